"""MaxText's input pipelines: processes with devices of the mesh read what a step takes, and all end together."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from multimesh_maxtext.errors import CheckpointError
from multimesh_maxtext.trainer.processes import absent, everywhere, has_device, place

_ROWS = (
    *("global_batch_size_to_load", "global_batch_size_to_load_eval"),
    *("global_batch_size_to_train_on", "global_batch_size_to_eval_on"),
)
"""Settings with the rows of a batch. All rows that are loaded are used."""


class _Share:
    """MaxText's settings, with as many rows to load that each reader gets its share of a batch.

    MaxText divides a batch by the number of processes, also where some of them read nothing. And Grain loads batches to
    evaluate on that are as large as those to train on.
    """

    def __init__(self, config: Any, readers: int, *, evaluates: bool) -> None:
        rows = config.global_batch_size_to_load_eval if evaluates else config.global_batch_size_to_load
        self._config, self._rows = config, rows * jax.process_count() // readers

    def __getattr__(self, name: str) -> Any:
        return self._rows if name in _ROWS else getattr(self._config, name)


class Together:
    """Batches of a dataset of MaxText, in all processes of a job, until one of its readers has no more.

    A reader looks one batch ahead. So at each step all processes know whether there is one, without waiting.

    Parameters
    ----------
    config
        MaxText's.
    mesh
        MaxText's. Processes with devices of it read; others get arrays without shards.
    layout
        Of each array of a batch.
    evaluates
        Whether the batches are those to evaluate on.
    """

    def __init__(self, config: Any, mesh: Mesh, layout: Sharding, *, evaluates: bool = False) -> None:
        from maxtext.utils.maxtext_utils import get_shaped_batch

        self._mesh, self._layout = mesh, layout
        self._types = get_shaped_batch(config, is_eval=evaluates)
        self._readers = sorted({device.process_index for device in mesh.devices.flat})
        self._flags = NamedSharding(mesh, P(mesh.axis_names))
        by_reader = sorted(mesh.devices.flat, key=lambda device: device.process_index)
        devices = np.reshape(np.array(by_reader, object), (len(self._readers), -1))
        self._shares = NamedSharding(Mesh(devices, ("reader", "copy")), P("reader"))
        self._loader: Any = None
        if jax.process_index() in self._readers:
            make = _make(config.dataset_type.value, evaluates=evaluates)
            # MaxText wants a row for each device of the mesh that it gets.
            mesh = Mesh(devices[:, 0], ("reader",))
            self._loader = make(_Share(config, len(self._readers), evaluates=evaluates), mesh, self._readers)
        self._start()

    def _start(self) -> None:
        self._ahead: tuple[Any, bytes, Any] | None = None
        self._failure: Exception | None = None
        self._position = self._own_position()

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        batch, position, there = self._ahead or self._look()
        if not int(there):
            self._ahead = batch, position, there
            if self._failure:
                raise self._failure
            raise StopIteration("a process that reads has come to the end of its data")
        self._ahead, self._position = self._look(), position
        return batch

    def _look(self) -> tuple[Any, bytes, Any]:
        """Read a batch; return it, the position after it, and whether all readers have one, known by all processes."""
        rows = None
        if self._loader is not None:
            try:
                rows = next(self._loader.local_iterator, None)
            except Exception as error:  # noqa: BLE001 - raised once all processes know that this one has no batch
                self._failure = error
        batch = {name: self._whole(rows and rows[name], like) for name, like in self._types.items()}
        flag = place(np.full(self._mesh.size, rows is not None, np.int32), self._flags)
        there = self._least(flag)
        return batch, self._own_position(), everywhere(there)

    def _least(self, flag: jax.Array) -> jax.Array:
        """The least of numbers on each device of the mesh."""
        layout = NamedSharding(self._mesh, P())
        if not has_device(layout):
            return absent(jax.ShapeDtypeStruct((), flag.dtype), layout)
        return jax.jit(jnp.min, out_shardings=layout)(flag)

    def _whole(self, rows: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Lay out an array of a batch, of which this process has some rows."""
        if not has_device(self._layout):
            return absent(like, self._layout)
        shape = (like.shape[0] // len(self._readers), *like.shape[1:])
        own = np.zeros(shape, like.dtype) if rows is None else np.asarray(rows, like.dtype)
        if len(self._readers) == 1:
            return place(own, self._layout)
        pieces = jax.device_put([own] * len(self._mesh.local_devices), list(self._mesh.local_devices))
        shares = jax.make_array_from_single_device_arrays(like.shape, self._shares, pieces)
        return jax.device_put(shares, self._layout)

    def _own_position(self) -> bytes:
        """Where the next batch begins; of data that has no position, and where nothing is read, that is nothing."""
        iterator: Any = getattr(self._loader, "local_iterator", None)
        found = iterator.get_state() if hasattr(iterator, "get_state") else None
        found = found.decode() if isinstance(found, bytes) else found
        return json.dumps({"readers": len(self._readers), "position": found}).encode()

    def get_state(self) -> bytes:
        """Return the position after the newest batch, as MaxText writes it to a checkpoint."""
        return self._position

    def set_state(self, state: bytes) -> None:
        """Go on from a position.

        Raises ``CheckpointError`` where other processes read.
        """
        found = json.loads(state)
        if "readers" not in found:  # one process wrote MaxText's own form once
            found = {"readers": 1, "position": found}
        if found["readers"] != len(self._readers):
            raise CheckpointError("the position in the data is of another number of processes that read")
        if self._loader is not None:
            self._loader.local_iterator.set_state(found["position"])
        self._start()

    def reset(self) -> None:
        """Begin anew."""
        if self._loader is not None:
            self._loader.reset()
        self._start()


def _make(kind: str, *, evaluates: bool) -> Callable[..., Any]:
    """Return MaxText's function that makes the reader of a kind of dataset."""
    modules = {"tfds": "tfds_data_processing", "c4_mlperf": "tfds_data_processing_c4_mlperf"}
    module = importlib.import_module(f"maxtext.input_pipeline.{modules.get(kind, f'{kind}_data_processing')}")
    return getattr(module, f"make_{kind}_{'eval' if evaluates else 'train'}_iterator")
