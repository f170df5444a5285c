"""From overrides to one resolved configuration: Hydra's composition, with every mistake said in one line."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from harness.check import check_targets, check_value, check_values
from harness.errors import BadInput, explain, not_allowed
from harness.texts import one_line

CONF = Path(__file__).resolve().parent.parent / "conf"
# What a user may set of Hydra's own configuration: where blocks run, and how much Hydra says.
HYDRA_KEYS = ("hydra/launcher", "hydra.launcher.", "hydra.verbose")
STUDY_KEYS = ("study", "run_dir")  # about the study, not about what an arm is


class _ReadOnce(CachingConfigRepository):
    """Keeps each file of conf/ as it was parsed. Hydra's own keeps it for one composition, and changes some of it."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        return copy.deepcopy(super().load_config(config_path))

    def __deepcopy__(self, memo: dict[int, Any]) -> _ReadOnce:
        return self  # every composition begins with a copy of the repository


@contextmanager
def hydra_session() -> Iterator[ConfigLoader]:
    """Hydra initialised on conf/, whatever the working directory; inside a job or another session it already is."""
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
        return
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        loader.repository = _ReadOnce(loader.repository)  # type: ignore[assignment]  # Hydra asks for no more
        yield loader


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides as Hydra understands them, after the rules that hold for every one of them."""
    with hydra_session() as loader:
        try:
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        except HydraException as error:
            raise explain(error) from error
        for override in parsed:
            _check_key(override)
    return parsed


@functools.cache
def compose_config(overrides: tuple[str, ...]) -> dict[str, Any]:
    """The whole resolved configuration, checked. ``overrides`` holds no sweep. BadInput says what is wrong with it."""
    parsed = parse(overrides)
    with hydra_session():
        composed, choices = _compose(list(overrides))
    try:
        config = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise BadInput(f"{missing[0]}: needs a value; give {missing[0]}=...")
    if not isinstance(config, dict):
        raise BadInput("conf/config.yaml must be a mapping")
    resolved = {str(key): value for key, value in config.items()}
    check_targets(resolved)
    for override in parsed:
        if not is_group_choice(override) and not override.is_hydra_override():
            key = override.key_or_group
            check_value(key, OmegaConf.select(composed, key), default=_declared(key, choices))
    check_values(resolved)
    return resolved


def compose_arm(overrides: Sequence[str]) -> dict[str, Any]:
    """One arm's resolved configuration: everything but what concerns the study as a whole."""
    config = compose_config(tuple(overrides))
    return copy.deepcopy({key: value for key, value in config.items() if key not in STUDY_KEYS})


def is_group_choice(override: Override) -> bool:
    """True for ``group=option``, False for ``key=value``."""
    key = str(override.key_or_group)
    return "/" in key or key in groups()


@functools.cache
def groups() -> tuple[str, ...]:
    """The axes and other groups that conf/ offers, sub-groups left out."""
    return tuple(sorted(path.name for path in CONF.iterdir() if path.is_dir()))


def options(group: str) -> list[str]:
    """What may be chosen in a group or sub-group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def quoted(value: str) -> str:
    """A string as the override grammar reads it back, whatever characters it holds."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _compose(overrides: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """The configuration, and which option each group and sub-group chose."""
    try:
        config = compose("config", overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error
    choices = {str(group): str(choice) for group, choice in config.hydra.runtime.choices.items()}
    with open_dict(config):
        del config["hydra"]
    return config, choices


def _declared(key: str, choices: dict[str, str]) -> Any:
    """The value that conf/ gives a key before anything overrides it; None if it says null or nothing."""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        group = "/".join(parts[:length])
        if group in choices:
            value = OmegaConf.select(_load(f"{group}/{choices[group]}"), ".".join(parts[length:]))
            if value is not None:
                return value
    return OmegaConf.select(_load("config"), key)


@functools.cache
def _load(name: str) -> DictConfig:
    loaded = OmegaConf.load(CONF / f"{name}.yaml")
    assert isinstance(loaded, DictConfig)
    return loaded


@functools.cache
def _available(group: str) -> list[str]:
    """What Hydra finds for a group, plugins included, wherever it looks: that takes a while."""
    with hydra_session() as loader:
        return loader.get_group_options(group, ObjectType.CONFIG)


def _check_key(override: Override) -> None:
    key, line = str(override.key_or_group), str(override.input_line)
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise BadInput(f"{line}: every option is declared in conf/; allowed: {line.lstrip('+~')} without '+' or '~'")
    if override.is_hydra_override() and not key.startswith(HYDRA_KEYS):
        raise BadInput(f"{line}: the harness sets this itself; allowed: hydra/launcher and hydra.launcher.*")
    value = override._value
    if key.endswith("_target_") or _names_target(value):
        raise BadInput(f"{line}: _target_ comes from conf/ only; choose an option of the group instead")
    if key.endswith(".name") and key != "study.name":  # or a record would say what did not run
        group = key.removesuffix(".name").replace(".", "/")
        raise BadInput(f"{line}: an option's name comes from conf/ only; allowed: {group}=<option>")
    if "/" not in key and key not in groups():
        return
    available = _available(key)
    if not available:
        known = [*groups(), *(f"{g.parent.name}/{g.name}" for g in CONF.glob("*/*") if g.is_dir())]
        raise not_allowed("", key, known, "no such group; allowed")
    for choice in override.sweep_string_iterator() if override.is_sweep_override() else [value]:
        if not isinstance(choice, (str, int, float, bool)) or str(choice) not in available:
            text = override.get_value_element_as_str() if not isinstance(choice, str) else choice
            raise not_allowed(key, one_line(text), available)


def _names_target(value: Any) -> bool:
    if isinstance(value, dict):
        return any(str(key) == "_target_" or _names_target(item) for key, item in value.items())
    return isinstance(value, list) and any(_names_target(item) for item in value)
