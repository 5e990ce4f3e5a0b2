"""Asks pods whose addresses can be reached from here."""

from typing import Final

import aiohttp

from .gather import Ask, NoAnswer

TIMEOUT: Final = aiohttp.ClientTimeout(total=5)


def asking(http: aiohttp.ClientSession, base: str) -> Ask:
    """GET of `base` and a path."""

    async def ask(path: str) -> bytes:
        try:
            async with http.get(base + path) as answer:
                body = await answer.read()
                if answer.status != 200:
                    said = body[:200].decode(errors="replace").strip()
                    raise NoAnswer(f"{path} answers {answer.status}: {said}")
                return body
        except TimeoutError:
            raise NoAnswer(f"{path}: no answer within {TIMEOUT.total:.0f} s") from None
        except aiohttp.ClientError as err:
            raise NoAnswer(str(err)) from err

    return ask
