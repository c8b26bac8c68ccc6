"""OCI sources: registries, image layouts and archives, as a stream of verified layers.

`source.open_image` is the way in. Importing it costs little; urllib3 is loaded when a registry is asked.
"""
