"""Reads a Prometheus metrics page."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


async def figures(url: str) -> list[Sample]:
    """Every sample of the page at `url`."""
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        families = text_string_to_metric_families(await answer.text())
    return [sample for family in families for sample in family.samples]


def figure(page: list[Sample], name: str, **labels: str) -> float:
    """The sum of the samples `name` that have `labels`."""
    required = labels.items()
    return sum(s.value for s in page if s.name == name and required <= s.labels.items())
