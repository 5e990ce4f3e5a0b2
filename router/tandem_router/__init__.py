"""The one-process router: decides like the EPP and hands off like the sidecar, without Envoy.

    client ──► server ──► requests ──► picker (tandem_epp)            where the request goes
                             └───────► generation (tandem_sidecar)   the request itself, to engines

- `configuration`: the router's YAML file, and the scheduling that holds where it names none
- `requests`: one request, from its last byte to the engines that serve it; read this first
- `placed`: a placed request on its engines, and on others if its decode engine fails
- `waiting`: requests for which no backend is ready
- `placements`: tells the picker's counts and verdicts what happens to each request
- `backends`: what the data path knows of the backends
- `warmups`: the first hand-off of each pair of backends
- `components`: creates both halves of the process and connects them
- `admin`: the admin port
- `run`: start, reload, drain and end
- `workers`: several such processes on one port; `workers_admin` answers for all of them
- `peers`: how workers reach each other
- `ready`: the line that tells that it serves

It has no policy and no HTTP of its own: what decides is in `tandem_epp`, what serves a request
whose engines are chosen is in `tandem_sidecar`, and neither knows the other.

Errors: `DocumentError`, with file and line, for a file that cannot be used; `CannotListen`.
"""
