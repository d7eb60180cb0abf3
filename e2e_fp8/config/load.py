"""Read a run's YAML file with ``--set`` overrides, and turn every mistake into one sentence."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from e2e_fp8.config.root import Config
from e2e_fp8.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """``SafeLoader`` that refuses a key given twice, where PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.value[index][0].start_mark)
        return super().construct_mapping(node, deep=deep)


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Parse ``path`` and apply ``overrides`` such as ``"training.learning_rate=1e-4"`` in order; values are YAML.

    Raises ConfigError naming field, value, rule and remedy, one line for each wrong field.
    """
    values = read_yaml(Path(path))
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, where=str(path))


def parse_config(values: dict[str, Any], *, where: str = "configuration") -> Config:
    """Validate a plain mapping; ``where`` names its origin in messages. Raises ConfigError."""
    try:
        return Config.model_validate(values)
    except ValidationError as err:
        raise ConfigError("\n".join(f"{where}: {error_sentence(e)}" for e in err.errors())) from err


def dump_config(cfg: Config) -> str:
    """The whole configuration as YAML with every default written out; ``load_config`` reads it back to an equal value."""
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def config_fields(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of all leaf fields below ``section``."""
    names: list[str] = []
    for name, info in section.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            names += config_fields(nested, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises ConfigError: unreadable, not YAML, not a mapping, or a key given twice."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError as err:
        raise ConfigError(f"{path} does not exist: pass a YAML file such as configs/quickstart.yaml.") from err
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read ({err}): pass a readable YAML text file.") from err
    except yaml.YAMLError as err:
        mark, problem = getattr(err, "problem_mark", None), getattr(err, "problem", None) or "syntax error"
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path} is not valid YAML ({place}{problem}): fix this line.") from err
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not sections: start it with a section such as 'model:'.")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    parts = name.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set {override} is not of the form section.field=value: write for example --set run.steps=10.")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as err:
        raise ConfigError(f"--set {override}: the value is not valid YAML: quote it, for example --set 'run.name=\"a b\"'.") from err
    node = values
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {part} holds {child!r}, not a section{_hint(name.strip())}.")
        node = child
    node[parts[-1]] = value


def _hint(name: str) -> str:
    """``; did you mean ...`` for a dotted field name, or a pointer to the field list."""
    fields = config_fields()
    leaf = name.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(name, fields, n=3, cutoff=0.6)
    close += [f for f in fields if f.rsplit(".", 1)[-1] == leaf and f not in close]
    close += [s for s in difflib.get_close_matches(name, list(Config.model_fields), n=1, cutoff=0.6) if s not in close]
    return f"; did you mean {' or '.join(close[:3])}" if close else "; docs/config.md lists all fields"


_NUMBER_RULES = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}
_TYPE_RULES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping",
}


def error_sentence(error: Any) -> str:
    """One sentence for a pydantic error: field, value, rule, remedy."""
    name, kind, context = ".".join(str(part) for part in error["loc"]), error["type"], error.get("ctx") or {}
    value = _shorten(repr(error.get("input")))
    if kind == "extra_forbidden":
        return f"unknown field {name}{_hint(name)}."
    if kind in _NUMBER_RULES:
        key, rule = _NUMBER_RULES[kind]
        return f"{name} is {value}, but {rule} {context[key]}: set a value in that range."
    if kind == "finite_number":
        return f"{name} is {value}, but must be finite: set an ordinary number."
    if kind == "literal_error":
        return f"{name} is {value}, but must be {context['expected']}: choose one of these."
    if kind == "string_pattern_mismatch":
        return f"{name} is {value}, but must match {context['pattern']}: rewrite it in that form."
    if kind in ("model_type", "model_attributes_type"):
        return f"{name or 'the file'} is {value}, but must be a section of fields: indent its fields below it{_hint(name)}."
    rule = _TYPE_RULES.get(kind.split("_")[0])
    if rule:
        return f"{name} is {value}, but must be {rule}: change the value{' or quote it' if rule == 'text' else ''}."
    return f"{name} is {value}, but {error['msg'][:1].lower()}{error['msg'][1:]}: change the value."


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
