"""Orbax's checkpointer in the trainer's process: layers in any layout, checksums, and errors of one line.

The names tell which layers an entry holds: ``layers_3`` that one, ``layers_0_3`` a stack of four, ``layers`` a stack of
all. MaxText stacks parameters and their moments along their second dimension, everything else along the first.

When Orbax has completed a checkpoint, its checksums are recorded; before one is loaded, they are compared.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from multimesh import MultiMeshError, UsageError, distributed
from multimesh_maxtext.checkpoint_folder import COMPLETE, aside, layers_of, layout, leaf_paths, look, split_layer_name
from multimesh_maxtext.errors import CheckpointError, DamagedCheckpointError, LauncherError
from multimesh_maxtext.trainer.ending import list_causes
from multimesh_maxtext.trainer.placement import name_path
from multimesh_maxtext.trainer.processes import absent, has_device, place

Entry = tuple[str, ...]

Sources = Mapping[Entry, list[tuple[Entry, int | None]]]
"""For a leaf of the run its layers in the checkpoint: the leaf of each, and the layer's number there if it is a stack.

Leaves that the checkpoint has under their own names are left out."""

_SECOND = ("params", "opt_state")  # stacked along the second dimension

_OTHERS = (LauncherError, MultiMeshError, jax.errors.JaxRuntimeError, FileExistsError)
"""Errors that no checkpoint causes: another process is lost, a device has no memory, the step was written before."""

_OF_TENSORSTORE = re.compile(r"[A-Z_]+: (?:.*: )?(.*?)(?: \[\w+='.*)?")
"""An error of TensorStore: the operations that it was about to do, what happened, details for its authors."""


def explain_failures(checkpoints: Any, layers: int | None = None) -> Any:
    """Let a checkpointer raise a `CheckpointError` where a checkpoint cannot be read or written, or was damaged.

    Returns the checkpointer. It refuses a checkpoint of another model. With the number of ``layers`` it loads one of
    any layout in the run's: arrays of other layouts pass through the host's memory, and random keys of layers stay as
    the run made them.
    """
    folder, load = Path(checkpoints.directory).resolve(), checkpoints.load_checkpointables
    save, wait = checkpoints.save_checkpointables_async, checkpoints.wait
    recording = list[threading.Thread]()

    def compare_and_load(step: int, abstract: dict[str, Any]) -> Any:
        _compare(folder, step)
        return _load(checkpoints, load, step, abstract, layers)

    def save_and_record(step: int, *args: Any, **kwargs: Any) -> Any:
        if response := save(step, *args, **kwargs):
            recording.append(threading.Thread(target=_record, args=(response, folder / str(step))))
            recording[-1].start()
        return response

    def wait_for_records() -> None:
        wait()
        while recording:
            recording.pop().join()

    checkpoints.load_checkpointables = _explain_errors(compare_and_load, _unread, folder)
    checkpoints.checkpointables_metadata = _explain_errors(checkpoints.checkpointables_metadata, _unread, folder)
    checkpoints.save_checkpointables_async = _explain_errors(save_and_record, _unwritten, folder)
    checkpoints.save_checkpointables = _explain_errors(checkpoints.save_checkpointables, _unwritten, folder)
    checkpoints.wait = _explain_errors(wait_for_records, _unwritten, folder)
    return checkpoints


def _load(checkpoints: Any, load: Callable[..., Any], step: int, abstract: dict[str, Any], layers: int | None) -> Any:
    target = flat(abstract["items"])
    stored = leaf_paths(Path(checkpoints.directory) / str(step) / "items") if layers else ()
    sources = find_sources(target, stored, layers or 0)
    described = checkpoints.checkpointables_metadata(step).metadata.get("items")
    if described is not None:  # else it cannot be read, and to load it tells why
        check_same(target, flat(described), sources)
    if not sources:
        return load(step, abstract)
    item = {path: leaf for path, leaf in target.items() if path not in sources}
    moved = {path: parts for path, parts in sources.items() if not jax.dtypes.issubdtype(target[path].dtype, _KEY)}
    for path, parts in moved.items():
        if has_device(target[path].sharding):
            item |= {source: np.ndarray for source, _ in parts}  # these come in the shape and type they have
    loaded = load(step, abstract | {"items": nest(item)})
    arrays = flat(loaded["items"])

    def make(path: Entry, leaf: Any) -> Any:
        if path not in moved:
            return arrays.get(path, leaf)
        if not has_device(leaf.sharding):
            return absent(leaf, leaf.sharding)
        array = join_layers(path, moved[path], arrays)
        if array.shape != leaf.shape:
            raise CheckpointError(
                f"the checkpoint's {'/'.join(path)} gives {array.shape}, but the model has {leaf.shape}; {_SAME_FLAGS}"
            )
        return place(np.asarray(array, leaf.dtype), leaf.sharding)

    return loaded | {"items": nest({path: make(path, leaf) for path, leaf in target.items()})}


_KEY = jax.dtypes.prng_key
_SAME_FLAGS = "use the flags that it was written with, but for the parallelism"


def check_same(model: Mapping[Entry, Any], stored: Mapping[Entry, Any], sources: Sources) -> None:
    """Raise ``CheckpointError`` where a checkpoint is of another model or optimizer, with the first leaf that differs.

    ``model``, ``stored``: leaves of the run, and of the checkpoint. Layers in another layout are checked when they are
    joined.
    """
    elsewhere = {*sources, *(source for parts in sources.values() for source, _ in parts)}
    compared = (path for path in {*model, *stored} - elsewhere if path[0] in _SECOND)
    for path in sorted(compared, key=lambda path: (_SECOND.index(path[0]), path)):
        there, here = (getattr(leaves.get(path), "shape", "not there") for leaves in (stored, model))
        if there != here:
            raise CheckpointError(
                f"--checkpoint is of another model or optimizer: {'/'.join(path)} is {there} in it and {here} in "
                f"this run; {_SAME_FLAGS}"
            )


def flat(tree: Any) -> dict[Entry, Any]:
    """Return the leaves of nested dictionaries and lists by their paths; ``None`` is a leaf."""
    return {name_path(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)}


def nest(leaves: Mapping[Entry, Any]) -> Any:
    """Return the dictionaries and lists that `flat` took apart; what numbers name is a list."""
    if () in leaves:
        return leaves[()]
    groups: dict[str, dict[Entry, Any]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    if all(map(str.isdecimal, groups)):
        names = map(str, range(max(map(int, groups)) + 1))
        return [nest(groups[name]) if name in groups else None for name in names]
    return {name: nest(group) for name, group in groups.items()}


def layers_in(name: str, total: int) -> range:
    """Return the layers that an entry of the decoder holds; none for an entry of another kind."""
    kind, numbers = split_layer_name(name) or ("", ())
    if kind != "layers":
        return range(0)
    return range(numbers[0], numbers[-1] + 1) if numbers else range(total)


def is_stack(name: str) -> bool:
    """Say whether an entry is a stack of layers rather than one layer."""
    return name.count("_") != 1


def find_sources(targets: Iterable[Entry], stored: Collection[Entry], total: int) -> Sources:
    """Return the places of a run's leaves in a checkpoint that has its layers under other names; see `Sources`.

    A leaf of which the checkpoint lacks a part is left out: layers may share a random generator.

    ``targets``, ``stored``: paths of the run's leaves, and of the checkpoint's.
    ``total``: number of layers.
    """

    def split(path: Entry) -> list[Entry]:
        """Return the path of the leaf of each layer in a leaf."""
        part = next(iter(_of(path)), "")
        at = path.index(part) if part else 0
        return [(*path[:at], str(layer), *path[at + 1 :]) for layer in layers_in(part, total)]

    homes: dict[Entry, tuple[Entry, int | None]] = {}
    for path in stored:
        stacked = any(map(is_stack, _of(path)))
        homes |= {layer: (path, number if stacked else None) for number, layer in enumerate(split(path))}
    layers = {path: split(path) for path in targets if path not in stored}
    return {path: [homes[part] for part in parts] for path, parts in layers.items() if parts and {*parts} <= {*homes}}


def join_layers(
    path: Entry, parts: Iterable[tuple[Entry, int | None]], arrays: Mapping[Entry, np.ndarray]
) -> np.ndarray:
    """Return a leaf of the run's state, cut from and joined of the checkpoint's."""
    axis = 1 if path[0] in _SECOND else 0
    layers = [arrays[name] if number is None else np.take(arrays[name], number, axis) for name, number in parts]
    return np.stack(layers, axis) if any(map(is_stack, _of(path))) else layers[0]


def _of(path: Entry) -> list[str]:
    """Names of layers in a path."""
    return [part for part in path if layers_in(part, 1)]


def export(folder: Path, step: int, target: Path, *, unrolled: bool = False) -> dict[str, Any]:
    """Write the parameters of a checkpoint to a new folder; return how its layers lie there, and how many bytes.

    The stacks of a pipeline's pieces (``layers_0_3``, ``layers_4_7``) become the one of a scan over all layers. Layers
    that are scanned stay so, unless they are to be ``unrolled``.

    Raises ``CheckpointError`` where layers that are not alike are scanned, and are to be unrolled.
    """
    paths = leaf_paths(folder / str(step) / "items")
    stored, names = [path for path in paths if path[0] == "params"], layers_of(paths)
    grouped = any(not layers_in(name, 1) for name in names) or any(len(_of(path)) > 1 for path in stored)
    if unrolled and grouped:
        raise CheckpointError(
            f"checkpoint {step} has its layers scanned in groups, which stay together; leave out --no-scan-layers"
        )
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # without the optimizer's state
    with context:
        like = nest(dict.fromkeys(stored, np.ndarray))
        arrays = flat(ocp.load(folder / str(step), like, checkpointable_name="items"))
    stacks = {part: path for path in stored for part in _of(path) if is_stack(part)}
    layers = max((layers_in(name, arrays[path].shape[1]).stop for name, path in stacks.items()), default=0)
    new = [f"layers_{layer}" for layer in range(layers)] if unrolled and stacks else ["layers"]
    targets = {tuple(name if part in stacks else part for part in path) for path in stored for name in new}
    sources = find_sources(targets, stored, layers)
    leaves = {path: join_layers(path, sources[path], arrays) if path in sources else arrays[path] for path in targets}
    scanned = not unrolled and layout(names) != "unrolled"
    ocp.save(target, nest(leaves), checkpointable_name="items", custom_metadata={"scan_layers": scanned})
    return {"scan_layers": scanned, "bytes": sum(array.nbytes for array in leaves.values())}


def ending_failed_saves(handler: Any, end: Callable[[CheckpointError], object]) -> Any:
    """Return a handler of one of several processes that calls ``end`` where its part of a checkpoint is not written.

    Orbax would only raise the error after 20 minutes in a barrier, in which the others wait for this process.
    """

    class Handler(handler):
        async def save(self, directory: Any, state: Any) -> Any:
            written = await super().save(directory, state)

            async def wait() -> None:
                try:
                    await written
                except Exception as error:
                    folder = Path(directory.path).resolve().parents[1]
                    failure = CheckpointError(_unwritten(folder, reason(error)))
                    failure.__cause__ = error
                    end(failure)
                    raise

            return wait()

    Handler.__module__, Handler.__qualname__ = handler.__module__, handler.__qualname__  # a checkpoint has its name
    return Handler


def _record(response: Any, path: Path) -> None:
    """Record the checksums of a checkpoint when it is complete. One that fails, or is removed, has none."""
    with suppress(Exception):  # what went wrong is raised where Orbax is asked next
        response.result()
        until = time.monotonic() + 60  # NFS may show it so late to a process that looked for it before
        while not (path / COMPLETE).exists() and time.monotonic() < until:
            time.sleep(0.1)
        distributed.record(path)


def _compare(folder: Path, step: int) -> None:
    """Compare the checksums of a checkpoint; set it aside if it was damaged."""
    path = folder / str(step)
    try:
        distributed.verify(path)
    except distributed.DamagedError as wrong:
        if jax.process_index() == 0:
            aside(path)
        distributed.barrier(f"checkpoint {step} is set aside")
        raise DamagedCheckpointError(f"{str(wrong).partition(';')[0]}; it is set aside as *.damaged") from None
    except distributed.NoRecordError:
        if jax.process_index() == 0:
            line = f"multimesh: checkpoint {step} has no checksums; its bytes are not compared"
            print(line, file=sys.stderr, flush=True)
    except UsageError:
        return  # without what Orbax needs, which that tells


def _explain_errors(method: Callable[..., Any], explain: Callable[..., str], folder: Path) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except _OTHERS:
            raise
        except Exception as error:
            raise CheckpointError(explain(folder, reason(error), *args)) from error

    return call


def _unread(folder: Path, why: str, step: int, *_: Any) -> str:
    others = [other for other in look(folder) if other != step]
    on = f"to go on from checkpoint {others[-1]}" if others else "to begin anew"
    return f"checkpoint {step} cannot be read ({why}); copy it again, or remove {folder / str(step)} {on}"


def _unwritten(folder: Path, why: str, *_: Any) -> str:
    steps = look(folder)
    usable = f"checkpoint {steps[-1]} there is complete" if steps else "no checkpoint is complete"
    return f"a checkpoint cannot be written to {folder} ({why}); {usable}; put it right and add --resume"


def reason(error: BaseException) -> str:
    """Return the cause of an error in a few words. Orbax wraps it several times."""
    *_, error = list_causes(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error).partition("\n")[0]
    of_tensorstore = _OF_TENSORSTORE.fullmatch(text)
    return (of_tensorstore[1] if of_tensorstore else text)[:200] or type(error).__name__
