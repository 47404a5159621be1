"""The store: where files lie, and how to read a dump from its file or from a pack.

Input: a dump's path (`places`), which names a dump file or a dump in a pack (`pack_build` writes packs, `pack_bytes` is their
format). Output: the dump as torch tensors or numpy arrays (`payload`). `staging` mirrors a store behind a URL. Begin with
`layout`, which lists the folders.
"""
