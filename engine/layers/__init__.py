"""Decoder layers made of few operations: what a layer consists of, which fused form computes the same, and what runs it.

- Finding out what a layer does: ``layer_structure`` and ``moe_structure`` by names, ``router_probe`` and ``probe`` by trying.
- Fused layers: ``fused_layers`` replaces layers by the form that ``fused_forms`` finds. A ``fused_decoder`` layer has
  ``fused_branches``, made of ``linears``, ``fused_mixers`` (those with states: ``fused_recurrent``) and ``fused_moe``.
  ``fused_model`` runs the whole decoder.
- The model's own modules on the engine's operations: ``experts``, ``recurrent``, ``indexed``, ``rotary``, ``quantised``.
- What is made of weights, and read in place of them: ``derived_weights``; in fp8, ``fp8_weights``.
"""
