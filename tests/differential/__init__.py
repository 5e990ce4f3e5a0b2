"""Bodies as the edge and the engines read them: what the EPP and the sidecar accept, each engine's
parser reads the same, or refuses.

`edge` reads as the EPP, the sidecar and the router do; `strategies` generates bodies in which
parsers may differ; `readers` are the parsers of engines, among them the libraries by which vLLM
reads bodies.
"""
