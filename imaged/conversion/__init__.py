"""An image's layers, or a directory, made into block images; and block images into files again."""
