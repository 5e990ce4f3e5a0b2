"""Write the project's container images from the checkout, without a container daemon.

    make images        dist/images/tandem.tar, dist/images/tandem-engine.tar

`oci` writes layers and archives and knows nothing of Python; `contents` says what lies in each
layer; `closure` asks the dynamic linker which libraries a file needs; `__main__` puts the images
together. Layers are kept in `build/images`, each under a key made of what it is made from, so a
change of the project's code writes one small layer anew.

The images hold this machine's own Python and its libraries: they suit its architecture and are
meant for tests and for a private registry. The Dockerfiles beside this file make the same images
from public base images.
"""
