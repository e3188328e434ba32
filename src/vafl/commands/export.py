"""`vafl export`: export one party's trained model as an ONNX file, for use without vafl."""

import argparse
import logging
import warnings
from pathlib import Path

import torch
from rich.console import Console

from vafl.errors import ConfigError
from vafl.files import write_atomically
from vafl.models.store import read_model
from vafl.run.model_store import model_folder, rebuild

_OUTPUTS = {"embedding": "embedding", "head": "outputs"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl export`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument(
        "party", metavar="PARTY", help="the party whose model to export; the server's is the head"
    )
    parser.add_argument("out", type=Path, metavar="OUT.onnx")
    parser.add_argument(
        "--embedding",
        default="",
        metavar="package.module:Factory",
        help="the factory of a custom model; vafl imports it only if you name it here",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Write the ONNX file atomically, readable only by its owner."""
    if options.out.suffix != ".onnx":
        raise ConfigError("VFL-9071", f'the file to write must end in .onnx. Found "{options.out}".')
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = export(model_folder(options.run, options.party), options.embedding)
    write_atomically(options.out, content, private=True)
    console.print(f"wrote {options.out}: {len(content):,} bytes")


def export(folder: Path, factory: str = "") -> bytes:
    """Return the model in `folder` as ONNX.

    An embedding maps `features` [rows, ...] to `embedding` [rows, width], a head maps them to `outputs`.

    Features are those that the model was trained on, after the party's encoding. The noise that a private
    client adds is not part of the model.

    Args:
        folder: the model folder.
        factory: the custom model factory, as the user names it; see `rebuild`.
    """
    try:
        import onnxscript  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "VFL-9072",
            f"export needs the packages of the onnx extra. {error}. Install them: pip install 'vafl[onnx]'.",
        ) from error
    stored = read_model(folder)
    manifest, module = stored.manifest, rebuild(stored, factory)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it logs optimisation statistics
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own deprecated functions
        program = torch.onnx.export(
            module,
            (torch.zeros(2, *manifest.features),),
            dynamo=True,
            input_names=["features"],
            output_names=[_OUTPUTS[manifest.kind]],
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    for name in ("party", "records", "config_digest"):
        program.model.metadata_props[f"vafl.{name}"] = getattr(manifest, name)
    content: bytes = program.model_proto.SerializeToString()
    return content
