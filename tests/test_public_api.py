"""The names vafl promises, and what importing it costs."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

import vafl


def test_the_public_names_are_these():
    assert vafl.__all__ == [
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


@pytest.mark.parametrize("name", vafl.__all__)
def test_every_public_name_is_there(name):
    assert getattr(vafl, name) is not None
    assert name in dir(vafl)


def test_a_name_that_is_not_there_fails_as_anywhere():
    with pytest.raises(AttributeError, match="module 'vafl' has no attribute 'Verticle'"):
        _ = vafl.Verticle


def test_the_version_is_that_of_the_package():
    assert vafl.__version__ == importlib.metadata.version("vafl")


def test_importing_vafl_does_not_load_torch():
    code = "import sys, vafl; vafl.VaflError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
