"""flaop inside other libraries' models. Nothing here is imported by `import flaop`."""
