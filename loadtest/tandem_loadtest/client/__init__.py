"""The client that sends one request and measures it.

    settings = ClientSettings(url="http://127.0.0.1:8080", model="tiny")
    async with Client(settings) as client:
        result = await client.send(Call("Once upon a time", max_tokens=16))

A request that fails raises nothing: `Result.outcome` and `Result.error` say what happened.

`bodies` is the JSON to post for each API, `http` an HTTP/1.1 connection and its pool, `tcp` what
the kernel knows of a connection, `sse` the parser of event streams, `answers` what each API's
answers mean, `outcome` the class of a request by what was observed, `reasons` what may be shown of
its failure, `reference` compares two answers. All but `client`, `http` and `tcp` are pure.

Read `client`, then `outcome`.
"""

from .client import Client
from .settings import ClientSettings, SettingsError

__all__ = ["Client", "ClientSettings", "SettingsError"]
