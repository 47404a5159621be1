"""The store: where files lie, and how a dump is read, wherever it lies.

In comes a dump's path (`places`): a file of its own, or a pack with many (`pack_build` writes one, `pack_bytes` is its format).
Out goes the dump as torch's tensors or numpy's (`payload`). `staging` mirrors a store behind a URL. Begin with
`layout`, which draws the folders.
"""
