"""Batches of every run of ``run.py``, in place of MaxText's: the same for any number of processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.errors import UnsupportedError
from multimesh_maxtext.trainer import checkpointer, preemption
from multimesh_maxtext.trainer.processes import absent, place
from multimesh_maxtext.trainer.reading import Together
from multimesh_maxtext.trainer.relayout import check_first

keeps_metrics = True
"""Only ``run.py`` empties the metrics file. MaxText does at every step 0, and each evaluation has one."""

loads_each_row = True
"""Only the rows that a step trains on are loaded. MaxText loads one for each device, and drops what is too many."""

_EVALUATION = 0x1F1F1F1F
"""MaxText changes these bits of the seed for the data to evaluate on."""


def batches(config: Any, mesh: Mesh) -> tuple[Any, Any] | None:
    """Return iterators over the batches to train and to evaluate on (or None); ``None`` where MaxText's own serve."""
    from maxtext.utils.sharding import get_input_data_sharding

    if config.enable_checkpointing:
        preemption.listen()
    layout = get_input_data_sharding(config, mesh)
    evaluates = config.eval_interval > 0
    if config.dataset_type == "olmo_grain":
        seed, rows = config.data_shuffle_seed ^ _EVALUATION, config.global_batch_size_to_load_eval
        evaluation = Text(config, layout, seed, rows) if evaluates else None
        seed, rows = config.data_shuffle_seed, config.global_batch_size_to_load
        return Text(config, layout, seed, rows, first=_next_step(config)), evaluation
    if config.dataset_type == "synthetic":
        return None if mesh.local_devices else (Elsewhere(config, mesh, layout), Elsewhere(config, mesh, layout))
    return Together(config, mesh, layout), Together(config, mesh, layout, evaluates=True) if evaluates else None


def place_state(abstract_state: Any, shardings: Any, checkpoints: Any) -> tuple[Any, Any, Any]:
    """Leave the train state as it is; check the checkpoints that it is read from."""
    if hasattr(checkpoints, "load_checkpointables"):  # Orbax's emergency checkpointers have an older API
        checkpoints = checkpointer.telling(check_first(checkpoints))
    return abstract_state, shardings, checkpoints


def _next_step(config: Any) -> int:
    """Return the step that training goes on with."""
    return look(Path(config.checkpoint_dir)).next_step if config.enable_checkpointing else 0


class Text:
    """Batches of tokens in the order of one process of MaxText, without an end; a process reads the rows it holds.

    Parameters
    ----------
    config
        MaxText's.
    layout
        Of each array of a batch.
    seed
        Of the order. Each pass over the text has another order.
    rows
        Of a batch.
    first
        Number of the first batch.
    """

    def __init__(self, config: Any, layout: Sharding, seed: int, rows: int, *, first: int = 0) -> None:
        from maxtext.input_pipeline import olmo_data_grain as olmo
        from maxtext.input_pipeline.olmo_data import load_index

        index = load_index(config.olmo_index_path)
        if index.sequence_length != config.max_target_length:
            raise UnsupportedError(
                f"{config.olmo_index_path} has sequences of {index.sequence_length} tokens, and the run of "
                f"{config.max_target_length}; use --sequence-length {index.sequence_length}"
            )
        moved = {config.olmo_path_remap_from: config.olmo_path_remap_to} if config.olmo_path_remap_from else {}
        self._source = olmo.OlmoNpyDataSource(index, path_remap=moved)
        self._order = olmo.OlmoIndexSampler(total_instances=index.total_instances, seed=seed)
        filters = [olmo.NgramFilterTransform()] if config.olmo_apply_ngram_filter else []
        self._transforms = [*filters, olmo.ShiftToInputsTargets()]
        self._layout = layout
        self._rows = rows
        self._first = self._next = first

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        like = self._row(0)
        mine = self._layout.addressable_devices_indices_map((self._rows, *like["inputs"].shape))
        batch = {name: np.zeros((self._rows, *x.shape), x.dtype) for name, x in like.items()}
        for row in sorted({row for index in mine.values() for row in range(self._rows)[index[0]]}):
            for name, x in self._row(row).items():
                batch[name][row] = x
        self._next += 1
        return {name: place(x, self._layout) for name, x in batch.items()}

    def _row(self, number: int) -> dict[str, np.ndarray]:
        """Read a row of the next batch."""
        instance = self._source[self._order[self._next * self._rows + number].record_key]
        return functools.reduce(lambda found, transform: transform.map(found), self._transforms, instance)

    def reset(self) -> None:
        """Begin anew."""
        self._next = self._first


class Elsewhere:
    """MaxText's synthetic batches in a process that has no shard of them: arrays without shards, without an end."""

    def __init__(self, config: Any, mesh: Mesh, layout: Sharding) -> None:
        from maxtext.input_pipeline.synthetic_data_processing import SyntheticDataIterator

        make = functools.partial(SyntheticDataIterator.raw_generate_synthetic_data, config)
        types = jax.eval_shape(make, SyntheticDataIterator(config, mesh).data)
        self._batch = jax.tree.map(lambda x: absent(x, layout), types)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._batch

    def reset(self) -> None:
        """Begin anew."""
