"""A Dask cluster runs one version of dl2gpu, or the scan says so and does not start.

Dask itself compares Python, Dask and the libraries that carry its messages, and warns; it does not
know dl2gpu. Workers of another version would give parts of one report by other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["VersionError", "check_versions", "disagreement"]


class VersionError(RuntimeError):
    """Workers run another version of dl2gpu than this process, or none."""


def check_versions(client: Client) -> None:
    """Asks every worker for its version of dl2gpu. To be called before work is handed out.

    Raises:
        VersionError: some have another version, or none: names each version and its workers.
    """
    answers: Any = client.get_versions(packages=["dl2gpu"])
    found = disagreement(answers)
    if found is not None:
        raise VersionError(found)


def disagreement(versions: Mapping[str, Any]) -> str | None:
    """What to tell where the workers disagree with the client; None where all run one version.

    ``versions`` is what ``Client.get_versions(packages=["dl2gpu"])`` gives. The scheduler moves
    messages without looking into them, so its version does not matter.
    """
    ours = versions["client"]["packages"]["dl2gpu"]
    others: dict[str, list[str]] = {}
    for address, worker in sorted(versions["workers"].items()):
        theirs = worker["packages"].get("dl2gpu") if worker else None
        if theirs != ours:
            others.setdefault(theirs or "no dl2gpu", []).append(address)
    if not others:
        return None
    found = "; ".join(
        f"{version} on {len(workers)} of {len(versions['workers'])} ({workers[0]}"
        f"{', ...' if len(workers) > 1 else ''})"
        for version, workers in sorted(others.items())
    )
    return (
        f"expected dl2gpu {ours} on every worker of the cluster, as here; found {found}; "
        "start client and workers from one image"
    )
