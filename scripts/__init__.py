"""What `make` calls: package installation, the Debian image, the demo."""
