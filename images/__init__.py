"""Write the project's container images from the checkout, without a container daemon.

    make images        dist/images/tandem.tar, tandem-epp.tar, tandem-router.tar,
                       tandem-sidecar.tar, tandem-engine.tar,
                       tandem-vllm-storage.tar

`oci` writes layers and archives; `contents` selects the files of each layer; `closure` asks the
dynamic linker which libraries a file needs; `stub` makes empty libraries; `build` assembles the
images; `hot_path` compiles the request paths of EPP and sidecar. Layers are cached in
`build/images` under a hash of their inputs, so a change of the project's code rewrites one small
layer.

The images contain this machine's Python and system libraries. They run on its architecture only
and are meant for tests and for a private registry. The Dockerfiles beside this file build the same
images from public base images.
"""
