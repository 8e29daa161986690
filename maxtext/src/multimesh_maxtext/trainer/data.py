"""Batches of every run of ``run.py``, in place of MaxText's: the same for any number of processes."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from multimesh_maxtext.checkpoint_folder import look
from multimesh_maxtext.errors import FlagError, UnsupportedError
from multimesh_maxtext.trainer import checkpointer, processes
from multimesh_maxtext.trainer.processes import absent, everywhere, has_device, place

keeps_metrics = True
"""Only ``run.py`` empties the metrics file. MaxText does at every step 0, and each evaluation has one."""

loads_each_row = True
"""Only the rows that a step trains on are loaded. MaxText loads one for each device, and drops what is too many."""

_EVALUATION = 0x1F1F1F1F
"""MaxText changes these bits of the seed for the data to evaluate on."""


def batches(config: Any, mesh: Mesh) -> tuple[Any, Any] | None:
    """Return iterators over the batches to train and to evaluate on (or None); ``None`` where MaxText's own serve."""
    from maxtext.utils.maxtext_utils import get_shaped_batch
    from maxtext.utils.sharding import get_input_data_sharding

    if config.enable_checkpointing:
        processes.listen()
    layout = get_input_data_sharding(config, mesh)
    evaluates = config.eval_interval > 0
    if config.dataset_type == "olmo_grain":
        first = max(look(Path(config.checkpoint_dir)), default=-1) + 1 if config.enable_checkpointing else 0
        training = read_text(config, layout, config.data_shuffle_seed, config.global_batch_size_to_load, first=first)
        seed, rows = config.data_shuffle_seed ^ _EVALUATION, config.global_batch_size_to_load_eval
        return training, read_text(config, layout, seed, rows) if evaluates else None
    if config.dataset_type != "synthetic":
        return Together(config, mesh, layout), Together(config, mesh, layout, evaluates=True) if evaluates else None
    if mesh.local_devices:
        return None
    without_shards = {name: absent(like, layout) for name, like in get_shaped_batch(config).items()}
    return (Batches(lambda: itertools.repeat(without_shards)),) * 2


def place_state(abstract_state: Any, shardings: Any, checkpoints: Any) -> tuple[Any, Any, Any]:
    """Leave the train state as it is; check the checkpoints that it is read from."""
    if hasattr(checkpoints, "load_checkpointables"):  # Orbax's emergency checkpointers have an older API
        checkpoints = checkpointer.explain_failures(checkpoints)
    return abstract_state, shardings, checkpoints


class Batches(Iterator[Any]):
    """Batches without an end, which can begin anew."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self.reset()

    def __next__(self) -> Any:
        return next(self._batches)

    def reset(self) -> None:
        """Begin anew."""
        self._batches = self._begin()


def read_text(config: Any, layout: Sharding, seed: int, rows: int, *, first: int = 0) -> Batches:
    """Return batches of tokens in the order of one process of MaxText, from the ``first``; all processes read all rows.

    Each pass over the text has another order, by the ``seed``.
    """
    from maxtext.input_pipeline.olmo_data import load_index
    from maxtext.input_pipeline.olmo_data_grain import make_olmo_grain_data_loader

    index = load_index(config.olmo_index_path)
    if index.sequence_length != config.max_target_length:
        raise UnsupportedError(
            f"{config.olmo_index_path} has sequences of {index.sequence_length} tokens, and the run of "
            f"{config.max_target_length}; use --sequence-length {index.sequence_length}"
        )
    loader = make_olmo_grain_data_loader(
        index,
        seed=seed,
        batch_size=rows,
        shard_index=0,
        shard_count=1,
        apply_ngram_filter=config.olmo_apply_ngram_filter,
        path_remap={config.olmo_path_remap_from: config.olmo_path_remap_to},
        initial_step=first * rows,
    )
    return Batches(lambda: ({name: place(x, layout) for name, x in batch.items()} for batch in loader))


_ROWS = (
    *("global_batch_size_to_load", "global_batch_size_to_load_eval"),
    *("global_batch_size_to_train_on", "global_batch_size_to_eval_on"),
)
"""Settings with the rows of a batch. All rows that are loaded are used."""


_MODULES = {"tfds": "tfds_data_processing", "c4_mlperf": "tfds_data_processing_c4_mlperf"}


class ChangedSettings:
    """MaxText's settings with other values of some."""

    def __init__(self, config: Any, **values: Any) -> None:
        self.__dict__ |= {"_config": config, **values}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of pickle, which asks a copy that has no settings yet
            raise AttributeError(name)
        return getattr(self._config, name)


class Together(Iterator[dict[str, jax.Array]]):
    """Batches of a dataset of MaxText, in all processes of a job, until one of its readers has no more.

    A reader looks one batch ahead. So at each step all processes know whether there is one, without waiting. Processes
    with devices of MaxText's ``mesh`` read; others get arrays without shards.
    """

    def __init__(self, config: Any, mesh: Mesh, layout: Sharding, *, evaluates: bool = False) -> None:
        from maxtext.utils.maxtext_utils import get_shaped_batch

        self._mesh, self._layout, self._vocabulary = mesh, layout, config.vocab_size
        self._types = get_shaped_batch(config, is_eval=evaluates)
        by_reader = sorted(mesh.devices.flat, key=lambda device: device.process_index)
        self._readers = sorted({device.process_index for device in by_reader})
        devices = np.reshape(np.array(by_reader, object), (len(self._readers), -1))
        self._shares = NamedSharding(Mesh(devices, ("reader", "copy")), P("reader"))
        self._loader: Any = None
        if jax.process_index() in self._readers:
            # MaxText divides a batch by the number of processes, also where some of them read nothing. And Grain loads
            # batches to evaluate on that are as large as those to train on.
            rows = config.global_batch_size_to_load_eval if evaluates else config.global_batch_size_to_load
            share = dict.fromkeys(_ROWS, rows * jax.process_count() // len(self._readers))
            kind = config.dataset_type.value
            module = importlib.import_module(f"maxtext.input_pipeline.{_MODULES.get(kind, f'{kind}_data_processing')}")
            make = getattr(module, f"make_{kind}_{'eval' if evaluates else 'train'}_iterator")
            # MaxText wants a row for each device of the mesh that it gets.
            self._loader = make(ChangedSettings(config, **share), Mesh(devices[:, 0], ("reader",)), self._readers)
        self._start()

    def _start(self) -> None:
        self._ahead: tuple[Any, bytes, Any] | None = None
        self._failure: Exception = StopIteration("a process that reads has come to the end of its data")
        self._position = self._own_position()

    def __next__(self) -> dict[str, jax.Array]:
        batch, position, there = self._ahead = self._ahead or self._look()
        if not int(there):
            raise self._failure
        self._ahead, self._position = self._look(), position
        return batch

    def _look(self) -> tuple[Any, bytes, Any]:
        """Read a batch; return it, the position after it, and whether all readers have one, known by all processes."""
        rows = None
        if self._loader is not None:
            try:
                rows = next(self._loader.local_iterator, None)
                _check_tokens(rows, self._vocabulary)
            except Exception as error:  # noqa: BLE001 - raised once all processes know that this one has no batch
                rows, self._failure = None, error
        batch = {name: self._lay_out(rows and rows[name], like) for name, like in self._types.items()}
        layout = NamedSharding(self._mesh, P())
        if has_device(layout):
            flags = np.full(self._mesh.size, rows is not None, np.int32)
            every = place(flags, NamedSharding(self._mesh, P(self._mesh.axis_names)))
            there = jax.jit(jnp.min, out_shardings=layout)(every)
        else:
            there = absent(np.int32(), layout)
        return batch, self._own_position(), everywhere(there)

    def _lay_out(self, rows: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Lay out an array of a batch, of which this process has some rows."""
        if not has_device(self._layout):
            return absent(like, self._layout)
        shape = (like.shape[0] // len(self._readers), *like.shape[1:])
        share = np.zeros(shape, like.dtype) if rows is None else np.asarray(rows, like.dtype)
        if len(self._readers) == 1:
            return place(share, self._layout)
        return jax.device_put(jax.make_array_from_process_local_data(self._shares, share, like.shape), self._layout)

    def _own_position(self) -> bytes:
        """Return the position of the next batch as JSON: null for data without one, and where nothing is read."""
        iterator: Any = getattr(self._loader, "local_iterator", None)
        position = iterator.get_state() if hasattr(iterator, "get_state") else None
        position = position.decode() if isinstance(position, bytes) else position
        return json.dumps({"readers": len(self._readers), "position": position}).encode()

    def get_state(self) -> bytes:
        """Return the position after the newest batch, as MaxText writes it to a checkpoint."""
        return self._position

    def set_state(self, state: bytes) -> None:
        """Go on from a position, of which the command knows that as many processes read."""
        if self._loader is not None:
            self._loader.local_iterator.set_state(json.loads(state)["position"])
        self._start()

    def reset(self) -> None:
        """Begin anew."""
        if self._loader is not None:
            self._loader.reset()
        self._start()


def _check_tokens(rows: dict[str, np.ndarray] | None, vocabulary: int) -> None:
    """Raise ``FlagError`` for tokens that the model lacks: its embedding would clip them, and say nothing."""
    largest = int(np.max(rows["inputs"])) if rows else 0
    if largest >= vocabulary:
        raise FlagError(
            f"the data has token {largest}, and the model has {vocabulary} tokens; use vocab_size= with the number of "
            "tokens of your tokenizer, rounded up to a multiple of 128"
        )
