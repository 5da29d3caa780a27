"""Workers of another version are refused before they get work."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client, LocalCluster

from dl2gpu.engine.versions import VersionError, check_versions, disagreement


def versions(client: str, **workers: str | None) -> dict[str, Any]:
    def node(version: str | None) -> dict[str, Any]:
        return {"host": {}, "packages": {"dask": "2026.8.0", "dl2gpu": version}}

    return {
        "client": node(client),
        "scheduler": node("0.0.1"),
        "workers": {f"tcp://{name}:1": node(version) for name, version in workers.items()},
    }


def test_one_version_everywhere() -> None:
    assert disagreement(versions("0.2.0", a="0.2.0", b="0.2.0")) is None
    assert disagreement(versions("0.2.0")) is None


def test_other_versions_are_named_with_their_workers() -> None:
    found = disagreement(versions("0.2.0", a="0.1.0", b="0.2.0", c="0.1.0", d=None))
    assert found == (
        "expected dl2gpu 0.2.0 on every worker of the cluster, as here; found "
        "0.1.0 on 2 of 4 (tcp://a:1, ...); no dl2gpu on 1 of 4 (tcp://d:1); "
        "start client and workers from one image"
    )


def test_a_worker_that_does_not_answer_is_another_version() -> None:
    asked = versions("0.2.0", a="0.2.0")
    asked["workers"]["tcp://a:1"] = None
    assert "no dl2gpu on 1 of 1" in (disagreement(asked) or "")


def test_a_cluster_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one; its worker shares this process, so the client is given another version."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        check_versions(client)
        asked = client.get_versions(packages=["dl2gpu"])
        asked["client"]["packages"]["dl2gpu"] = "9.9.9"
        monkeypatch.setattr(client, "get_versions", lambda packages: asked)
        with pytest.raises(VersionError, match=r"expected dl2gpu 9\.9\.9 on every worker"):
            check_versions(client)
