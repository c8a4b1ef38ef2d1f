"""Write built models as an OCI image: data to mount next to Triton's own container.

Comes in: model folders with their manifests. Goes out: an OCI image layout in a folder, with each
model in the layout ``directory``, and a Dockerfile. The same models give the same bytes on every
machine. This room starts no programs of its own, changes no model and does not use the network.
"""
