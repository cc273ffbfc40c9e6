"""`expertctl verify`: is what is on the disk what was published, or packed?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl import figures
from expertctl.connection import AsJson

if TYPE_CHECKING:
    from expertctl.verifier import Report

EPILOG = (
    "Examples:\n\n"
    "  expertctl verify mlx-community/Qwen3-30B-A3B-4bit\n\n"
    "  expertctl verify ~/models/qwen3-packed --json"
)
#: Problems that one error names; the number of all is said, too.
SHOWN = 5


def command(
    model: Annotated[str, typer.Argument(help="Model folder, or a Hugging Face id in the cache.")],
    as_json: AsJson = False,
) -> None:
    """Check headers and sizes, and every byte that there is a checksum or hash for.

    Packed folders have a checksum of every expert; files in the Hugging Face cache are named by
    their hash. Of any other folder only headers, sizes and completeness can be checked. Exit code 3
    when something is not what it should be.
    """
    from expertctl.progress import byte_bar
    from expertctl.verifier import Verification
    from expertd_client.model_folder import model_folder
    from expertd_protocol.errors import Damaged

    verification = Verification(model_folder(model))
    with byte_bar("verifying", verification.total_bytes) as progress:
        report = verification.run(progress)
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(report.folder)}))
    else:
        print(report_text(report))
    if report.problems:
        more = len(report.problems) - SHOWN
        named = "; ".join(report.problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise Damaged(f"{report.folder} is damaged: {named}; download or pack it again")


def report_text(report: Report) -> str:
    """Say what was verified, and what was not."""
    lines = [
        f"{report.folder}",
        f"verified      {report.shards} headers of {report.tensors} tensors: sound, complete, of the "
        "right size",
    ]
    compared = []
    if report.hashed_files:
        compared.append(f"{report.hashed_files} files against the hashes in their names")
    if report.records:
        compared.append(f"{report.records} packed experts against their checksums")
    if report.checked_tensors:
        compared.append(f"{report.checked_tensors} other tensors against their checksums")
    if compared:
        size = figures.size(report.checked_bytes)
        lines.append(f"verified      {', '.join(compared)} ({size} read)")
    if report.unchecked:
        lines.append(
            f"not verified  the content of {len(report.unchecked)} files: there is no checksum for "
            f"{', '.join(report.unchecked[:3])}{', ...' if len(report.unchecked) > 3 else ''}"
        )
    if report.problems:
        lines.append(f"damaged       {len(report.problems)} of them, see below")
    return "\n".join(lines)
