"""The pools: custom resources as types, and the pods and children made from them."""
