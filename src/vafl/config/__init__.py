"""The configuration of a run: its sections, how files are read, what parties must agree on."""

from vafl.config.files import read_config, read_document
from vafl.config.schema import TABLE_DEFAULTS, Config, PartySettings, from_document

__all__ = ["TABLE_DEFAULTS", "Config", "PartySettings", "from_document", "read_config", "read_document"]
