"""What a VM boots: kernel, modules, initramfs, and the two programs of ours that run in the guest."""
