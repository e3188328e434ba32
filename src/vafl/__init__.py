"""Vertical asynchronous federated learning: the public names. Each is imported at its first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vafl.errors import ConfigError, DataError, RunError, RunFolderError, VaflError

if TYPE_CHECKING:
    from vafl.config import Config, read_config
    from vafl.estimator import VerticalClassifier, VerticalRegressor
    from vafl.run.assembly import Run, build

    __version__: str

__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "Run",
    "RunError",
    "RunFolderError",
    "VaflError",
    "VerticalClassifier",
    "VerticalRegressor",
    "__version__",
    "build",
    "read_config",
]

_MODULES = {  # public name -> the module that defines it
    "Config": "vafl.config",
    "Run": "vafl.run.assembly",
    "VerticalClassifier": "vafl.estimator",
    "VerticalRegressor": "vafl.estimator",
    "build": "vafl.run.assembly",
    "read_config": "vafl.config",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow to import and rarely needed

    try:
        return version("vafl")
    except PackageNotFoundError:  # a source checkout that is not installed
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
