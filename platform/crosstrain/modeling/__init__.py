"""Models: the base classes, the loss, mixture-of-experts routers and initialization on the meta device."""
