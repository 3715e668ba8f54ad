"""The public model that a fine-tune begins with, named and hashed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from confide.errors import ModelError
from confide.models.moe.families import refuse
from confide.models.resolve import resolve
from confide.privacy import statement as statements
from confide.privacy.statement import Base
from confide.release.hashes import base_hash
from confide.release.names import model_type


@dataclass(frozen=True)
class PublicBase:
    """A base model on disk, named and hashed."""

    folder: Path
    identity: Base

    @classmethod
    def of(cls, name: str) -> PublicBase:
        """Resolve a folder, `package:NAME` or hub id, and hash its encoder.

        Raises:
            ModelError: nothing is there, or it is a release, whose weights depend on records, or its family
                can't be trained.
        """
        folder = resolve(name)
        if (folder / statements.FILE_NAME).exists():
            raise ModelError(
                f"{name} is a release that states what it spent on records, not a public base; training "
                "on it would leave that out of the claim. Train from the public model underneath"
            )
        refuse(model_type(folder))
        # A release tells the world the model's name, not where it lies on its owner's machine.
        public = folder.resolve().name if Path(name).expanduser().is_dir() else name
        return cls(folder, Base(name=public, hash=base_hash(folder)))
