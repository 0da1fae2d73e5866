"""The digest in metadata.json: a SHA-256 of every file of a variant, as `kernels` computes it.

`kernels verify-signature` signs metadata.json alone and trusts the other files by this digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ALGORITHM = "sha256"
# top-level files without a hash: one holds the digest, the other is its signature
UNHASHED = ("metadata.json", "metadata.json.sigstore")


def digest(variant: Path) -> dict[str, Any]:
    """The digest of the files of a variant as they are on disk; bytecode is left out."""
    files = {}
    for file in sorted(variant.rglob("*")):
        inside = file.relative_to(variant)
        if not file.is_file() or str(inside) in UNHASHED:
            continue
        if file.suffix == ".pyc" or "__pycache__" in inside.parts:
            continue
        hashed = hashlib.sha256(file.read_bytes()).digest()
        files[inside.as_posix()] = base64.b64encode(hashed).decode()
    return {"algorithm": ALGORITHM, "files": files}


def seal(variant: Path) -> None:
    """Write the digest of a finished variant to its metadata.json."""
    path = variant / "metadata.json"
    content = json.loads(path.read_text()) | {"digest": digest(variant)}
    path.write_text(json.dumps(content, indent=2) + "\n")


def differences(variant: Path, stated: Mapping[str, Any]) -> Iterator[str]:
    """How the files of a variant differ from the digest that its metadata states."""
    if stated.get("algorithm") != ALGORITHM or not isinstance(stated.get("files"), dict):
        yield f"no digest with algorithm {ALGORITHM!r} and files"
        return
    wanted, found = stated["files"], digest(variant)["files"]
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            yield f"{name} is in the digest and not on disk"
        elif name not in wanted:
            yield f"{name} is on disk and not in the digest"
        elif wanted[name] != found[name]:
            yield f"{name} has other content than its hash says"
