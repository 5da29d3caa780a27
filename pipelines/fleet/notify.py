"""Messages to webhooks: generic JSON, or what Slack takes. Tried again, and never with a secret."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from pipelines.fleet.config import Config, Webhook

__all__ = ["NotifyError", "message", "send"]

_SHOWN: Final = 10
_FIRST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 60.0
_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class NotifyError(RuntimeError):
    """A message could not be sent. Names the variable of the address, and never the address."""


def message(told: dict[str, Any], hook: Webhook, config: Config) -> dict[str, Any] | None:
    """What ``hook`` is sent of a digest; None where it asks for nothing that there is."""
    groups = [
        g for g in told["groups"]
        if g["suppressed"] is None and g["status"] in hook.on
        and (hook.team is None or hook.team in g["teams"])
    ]  # fmt: skip
    if not groups:
        return None
    link = f"{config.notify.link.rstrip('/')}/{told['run']}/" if config.notify.link else None
    if hook.form == "json":
        rest = {k: told[k] for k in ("schema", "run", "night", "jobs", "deadlocked", "cost")}
        return {**rest, "link": link, "groups": groups}
    return _slack(told, groups, link)


def _slack(told: dict[str, Any], groups: list[dict[str, Any]], link: str | None) -> dict[str, Any]:
    title = f"{len(groups)} findings to look at, night {told['run']}"
    lines = [
        f"*{g['status']}* {_plain(g['kind'])} in {_plain(g['job'])}"
        f" ({g['jobs']} jobs, {g['gpu_hours']:,.1f} GPU-hours)\n{_plain(g['summary'] or '')[:500]}"
        for g in groups[:_SHOWN]
    ]
    if len(groups) > _SHOWN:
        lines.append(f"and {len(groups) - _SHOWN} more")
    if link:
        lines.append(f"<{link}|Report of the night>")
    sections = [{"type": "section", "text": {"type": "mrkdwn", "text": line}} for line in lines]
    header = {"type": "header", "text": {"type": "plain_text", "text": title}}
    return {"text": title, "blocks": [header, *sections]}


def _plain(text: str) -> str:
    """``text`` as Slack shows it and does not act upon it: no link, no mention, no style."""
    line = " ".join(text.split())
    for sign, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        line = line.replace(sign, escaped)
    return line.translate({ord(c): f"\N{ZERO WIDTH SPACE}{c}" for c in "*_~`"})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirection would carry the message, and what is secret in its address, elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def send(
    hook: Webhook, body: dict[str, Any], config: Config, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Posts ``body``, again where the other side is busy or broken, with longer and longer waits.

    Raises:
        NotifyError: the address is missing or no http(s) address, or the message was refused, or
            not taken in as many tries as ``notify.tries`` says.
    """
    address = os.environ.get(hook.url_env, "")
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
        raise NotifyError(
            f"webhook {hook.url_env}: expected an address (https://...) in the environment "
            f"variable of this name, found {'something else' if address else 'none'}"
        )
    request = urllib.request.Request(  # noqa: S310 - http or https, as checked
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirects)
    said = ""
    for n in range(config.notify.tries):
        if n:
            sleep(min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (n - 1)) * random.uniform(0.5, 1))  # noqa: S311 - spreads the tries
        try:
            with opener.open(request, timeout=config.notify.timeout_s):
                return
        except urllib.error.HTTPError as e:
            e.close()
            said = f"status {e.code}"
            if e.code not in _AGAIN:
                raise NotifyError(f"webhook {hook.url_env}: refused, {said}") from None
        except (OSError, ValueError) as e:  # whatever it says may hold the address
            said = type(e).__name__
    raise NotifyError(
        f"webhook {hook.url_env}: not taken in {config.notify.tries} tries, last {said}"
    )
