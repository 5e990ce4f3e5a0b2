"""The decode pod's proxy: runs the hand-off, prefill there, KV across, decode here.

Here belong the HTTP data path (`http`), what a request body says and may not say (`request`), whom
to believe about prefill pods (`routing`), the hand-off as a pure state machine (`handoff`), its
driver over real connections (`exchange`), and the process around them (`proxy`, `lifecycle`,
`admin`, `main`). Never: a choice between pods, which is the EPP's, nor anything of an engine but
its HTTP interface.

Read `handoff` first, then `exchange`.
"""
