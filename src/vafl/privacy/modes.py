"""The table of privacy modes: what each one noises, needs, forbids and guarantees.

| mode           | features | uploads | updates | trains the embedding | guarantee for a record |
|----------------|----------|---------|---------|----------------------|------------------------|
| `none`         |          |         |         | yes                  | none                   |
| `release_once` | noised   |         |         | yes                  | yes                    |
| `frozen`       |          | noised  |         | no                   | yes                    |
| `dp_train`     |          | noised  | noised  | yes                  | yes                    |
| `embed_only`   |          | noised  |         | yes                  | a weak bound only      |

Other modules ask the table (`settings.protection.noises_uploads`) instead of comparing mode names. A new mode
is a new row here.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["none", "release_once", "frozen", "dp_train", "embed_only"]
PrivateMode = Literal["release_once", "frozen", "dp_train", "embed_only"]  # modes that add noise
DEFAULT_PRIVATE_MODE: Literal["dp_train"] = "dp_train"  # what `auto` means once `noise` is set
NOISE_SETTINGS = ("clip", "noise", "gradient_clip", "gradient_noise")
_UPDATE_SETTINGS = ("gradient_clip", "gradient_noise")


@dataclass(frozen=True)
class Protection:
    """One privacy mode.

    Attributes:
        name: the value of `privacy.mode`.
        summary: how training proceeds, in a few words, for the tables of `vafl calibrate`.
        guarantee: the promise to a record, for `vafl privacy`.
        guaranteed: whether every record has a differential privacy guarantee. Such a mode needs a budget.
        needs: the settings that must be above 0.
        forbids: the settings that have no effect in this mode. A user who sets one expects protection that
            the mode does not give, so the configuration is refused.
        noises_features: the client noises its features once, before training. Everything computed from
            them afterwards costs no further privacy (post-processing).
        noises_uploads: the client noises every embedding that it uploads.
        noises_updates: the client noises the summed gradient of every local update.
        trains_embedding: the client trains its embedding model.
    """

    name: Mode
    summary: str
    guarantee: str
    guaranteed: bool
    needs: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    noises_features: bool = False
    noises_uploads: bool = False
    noises_updates: bool = False
    trains_embedding: bool = True

    @property
    def noises_anything(self) -> bool:
        return self.noises_features or self.noises_uploads or self.noises_updates

    @property
    def exposes_model(self) -> bool:
        """Return whether uploads show weights that were trained on records.

        An audit must then look for a record in the uploads of other records too.
        """
        return self.noises_uploads and self.trains_embedding

    @property
    def carries_records(self) -> bool:
        """Return whether the trained weights carry records past the noise, into the uploads of other records.

        An upload then costs privacy for every record that the model was trained on, not only for the
        uploaded one.
        """
        return self.exposes_model and not self.noises_updates


MODES: dict[Mode, Protection] = {
    mode.name: mode
    for mode in (
        Protection(
            name="none",
            summary="no noise",
            guarantee="no guarantee: clients upload their embeddings without noise",
            guaranteed=False,
            forbids=(*NOISE_SETTINGS, "mu_max", "layers"),
        ),
        Protection(
            name="release_once",
            summary="for any number of epochs",
            guarantee="per record: covers every use of the released features",
            guaranteed=True,
            needs=("clip", "noise"),
            forbids=(*_UPDATE_SETTINGS, "layers"),
            noises_features=True,
        ),
        Protection(
            name="frozen",
            summary="the embedding is not trained",
            guarantee="per record: every upload is noised, the embedding is not trained",
            guaranteed=True,
            needs=("clip", "noise"),
            forbids=_UPDATE_SETTINGS,
            noises_uploads=True,
            trains_embedding=False,
        ),
        Protection(
            name="dp_train",
            summary="the embedding is trained",
            guarantee="per record: every upload and every local update is noised",
            guaranteed=True,
            needs=NOISE_SETTINGS,
            noises_uploads=True,
            noises_updates=True,
        ),
        Protection(
            name="embed_only",
            summary="the only valid bound for the paper's noise",
            guarantee="a weak bound only: the trained model carries records past the noise",
            guaranteed=False,
            forbids=(*_UPDATE_SETTINGS, "mu_max"),
            noises_uploads=True,
        ),
    )
}
