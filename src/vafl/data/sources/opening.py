"""Open the source of a party, and make encoders again from what a model stores."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vafl.data.encoding import Encoder
from vafl.data.settings import LABEL_HOLDER
from vafl.data.source_settings import (
    ArraySettings,
    ImageSettings,
    PythonSettings,
    SeriesSettings,
    SourceSettings,
    TableSettings,
)
from vafl.data.sources.arrays import ArrayEncoder, ArraySource
from vafl.data.sources.base import RecordEncoder, Source
from vafl.data.sources.images import ImageEncoder, ImageSource
from vafl.data.sources.python import PythonEncoder, PythonSource
from vafl.data.sources.series import SeriesSource
from vafl.data.sources.series_encoder import SeriesEncoder
from vafl.data.tables import open_table
from vafl.errors import DataError
from vafl.names import table_owner

_ENCODERS: dict[str, Callable[[Mapping[str, Any]], RecordEncoder]] = {
    Encoder.kind: Encoder.from_dict,
    SeriesEncoder.kind: SeriesEncoder.from_dict,
    ImageEncoder.kind: ImageEncoder.from_dict,
    ArrayEncoder.kind: ArrayEncoder.from_dict,
    PythonEncoder.kind: PythonEncoder.from_dict,
}


def open_source(sources: Mapping[str, SourceSettings], name: str) -> Source:
    """Open a party's source. This reads headers only.

    If a client shares the label holder's file, its label and weight columns are ignored.

    Raises:
        ConfigError, DataError: the settings do not fit the files, or a file is missing or damaged.
    """
    name = table_owner(name)
    settings = sources[name]
    match settings:
        case TableSettings():
            return open_table(sources, name)
        case SeriesSettings():
            return SeriesSource(name, _without_labels(sources, settings))
        case ImageSettings():
            return ImageSource(name, settings)
        case ArraySettings():
            return ArraySource(name, settings)
        case PythonSettings():
            return PythonSource(name, settings)


def _without_labels(sources: Mapping[str, SourceSettings], settings: SeriesSettings) -> SeriesSettings:
    """Return the settings without the label and weight columns, if the file is the label holder's."""
    holder = sources.get(LABEL_HOLDER)
    if settings.wide or not isinstance(holder, TableSettings) or settings.path != holder.path:
        return settings
    secret = [column for column in (holder.label, holder.weight) if column]
    return replace(settings, ignore=(*settings.ignore, *secret))


def make_encoder(values: Mapping[str, Any]) -> RecordEncoder:
    """Make the encoder that `RecordEncoder.to_dict` described.

    Raises:
        DataError: the values do not describe an encoder.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _ENCODERS:
        raise DataError(
            "VFL-2343",
            f"a stored encoder must be of one of the kinds {', '.join(_ENCODERS)}. Found {kind!r}. Restore "
            "the model folder, or train again.",
        )
    return _ENCODERS[kind](values)
