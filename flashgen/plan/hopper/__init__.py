"""Plans of the sm_90a kernels: warp-specialized, by wgmma and TMA."""
