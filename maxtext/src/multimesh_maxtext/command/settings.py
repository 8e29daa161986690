"""``KEY=VALUE`` arguments as MaxText will read them, before it starts: its names, and the types of its values.

The types are those of MaxText's configuration classes. They come from the source, because importing it imports JAX.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from multimesh_maxtext.command.options import Options
from multimesh_maxtext.errors import UsageError

_SOURCES = ("common/common_types.py", "configs/types.py")
_ROOT = "MaxTextConfig"
_CLOUD = "it is for Google Cloud, which a run does without; see --metrics-file and --metrics-hook"
_PATHWAYS = "it is for Pathways; see --max-restarts and --fallback"
_IDLE = {
    **dict.fromkeys(
        ("enable_goodput_recording", "monitor_goodput", "enable_pathways_goodput", "goodput_job_name"), _CLOUD
    ),
    **dict.fromkeys((f"report_{kind}_metric_for_gcp_monitoring" for kind in ("heartbeat", "performance")), _CLOUD),
    **dict.fromkeys(("use_vertex_tensorboard", "enable_checkpoint_cloud_logger", "managed_mldiagnostics"), _CLOUD),
    **dict.fromkeys(("elastic_enabled", "enable_single_controller", "subslice_shape"), _PATHWAYS),
    "jax_distributed_initialization_timeout": "run.py starts the processes; use --start-timeout",
}
"""Settings of MaxText that would be accepted and do nothing in a run, and why. Switched off they are no error."""

_MANY = 12  # more values than this are not listed where some are near


class _Loader(yaml.SafeLoader):
    """Reads values as OmegaConf does for MaxText: 1e3 is a number, and a date is a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def _read(value: str) -> Any:
    return yaml.load(value, _Loader)  # noqa: S506


def read_values(settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings with their values as YAML reads them; what is no YAML stays as it is written."""
    found: dict[str, Any] = {}
    for key, value in (setting.split("=", 1) for setting in settings):
        found[key] = value
        with contextlib.suppress(yaml.YAMLError):  # `find_wrong_settings` says so
            found[key] = _read(value)
    return found


def read_dataset(options: Options) -> str:
    """Return MaxText's ``dataset_type`` of a run: what flags or a setting say, by default ``synthetic``."""
    if options.text:
        return "olmo_grain"
    return "tfds" if options.use_tfds_dataset else str(read_values(options.settings).get("dataset_type", "synthetic"))


def find_wrong_settings(settings: Sequence[str], package: Path) -> Iterator[tuple[str, UsageError]]:
    """Yield the settings that MaxText would refuse by their name or by their value, and why, with the nearest ones.

    ``package``: MaxText's package folder.
    """
    for setting in settings:
        key, value = setting.split("=", 1)
        types = find_types(package)
        if key in types:
            why = _refusal(types[key], key, value)
        else:
            near = " or ".join(difflib.get_close_matches(key, types, n=3, cutoff=0.75))
            hint = f"did you mean {near}?" if near else f"its settings are in {package / 'configs/base.yml'}"
            why = f"MaxText has no setting {key}; {hint}"
        if why:
            yield setting, UsageError(f"{setting}: {why}")


def find_idle_settings(settings: Sequence[str]) -> Iterator[UsageError]:
    """Yield an error for each setting that would be accepted and do nothing."""
    for key, value in read_values(settings).items():
        if key in _IDLE and value:
            yield UsageError(f"{key}={value} would do nothing here: {_IDLE[key]}; leave it out")


def _refusal(make: Callable[[], Any], key: str, value: str) -> str:
    """Return why MaxText does not take a value; empty where it may."""
    try:
        read = _read(value)
    except yaml.YAMLError:
        return "the value is no YAML; put strings with special characters in quotes"
    read = None if isinstance(read, str) and read.lower() == "none" else read  # as MaxText reads it
    try:
        pydantic.TypeAdapter(make()).validate_python(read)
    except NameError:  # a group, or a default that is computed
        return ""
    except pydantic.ValidationError as refused:
        error = refused.errors()[0]
    else:
        return ""
    kind, message = error["type"], error["msg"]
    if kind in ("list_type", "dict_type") or (kind == "string_type" and read is None):
        return ""  # MaxText makes lists and strings of some of these
    if "expected" not in error.get("ctx", {}):
        return f"MaxText refuses it: {message[0].lower()}{message[1:]}"
    choices = [choice.strip("'") for choice in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(value, choices, n=3, cutoff=0.6) if len(choices) > _MANY else []
    hint = f"near it are {', '.join(near)}" if near else f"it is one of {', '.join(filter(None, choices))}"
    return f"MaxText has no such {key}; {hint}"


@functools.cache
def find_types(package: Path) -> Mapping[str, Callable[[], Any]]:
    """Return a function for each setting that makes its type, with its limits; some raise a `NameError`."""
    names: dict[str, Any] = {"Annotated": Annotated}
    classes: dict[str, ast.ClassDef] = {}
    for source in _SOURCES:
        body = ast.parse((package / source).read_text(encoding="utf-8")).body
        classes |= {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        for node in filter(_is_type, body):
            with contextlib.suppress(NameError):  # it is made of more than types
                exec(compile(ast.Module([node], []), source, "exec"), names)  # noqa: S102
    types: dict[str, Callable[[], Any]] = {}
    waiting = [_ROOT]
    while waiting:
        group = classes[waiting.pop(0)]
        waiting += [base.id for base in group.bases if isinstance(base, ast.Name) and base.id in classes]
        for item in group.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                types.setdefault(item.target.id, functools.partial(_type, item, names))
    return types


def _is_type(node: ast.stmt) -> bool:
    """Whether a statement makes a type of settings, or imports its parts."""
    match node:
        case ast.Import(names=[ast.alias(name=module)]) | ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in ("enum", "typing", "pydantic")
        case ast.ClassDef(bases=bases):
            return any("Enum" in ast.unparse(base) for base in bases)
        case ast.Assign(value=ast.Name() | ast.Subscript()):
            return True
    return False


def _type(item: ast.AnnAssign, names: dict[str, Any]) -> Any:
    field = ast.unparse(item.value) if item.value else None
    return eval(f"Annotated[{ast.unparse(item.annotation)}, {field}]", names)  # noqa: S307
