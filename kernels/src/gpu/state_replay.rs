//! GPU launches of the state updates after the verification of draft tokens.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream};

use super::recurrent::{SLICE_WARPS, key_dim, rule_blocks, state_ptr};
use crate::gpu::GpuBackend;
use crate::{GpuKernel, RecurrentStateLayout, ReplayInputWrite, ReplayRowPreparation, StateReplay};

static REPLAY: KernelSource = kernel_source!("gdn_replay/gdn_replay.hip");

const THREADS: u32 = 256;

impl GpuKernel for ReplayRowPreparation<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { arrays, cu_q, facts, rows } = self;
        // The defines have no effect on this kernel.
        let defines = [("ACT_F32", 1), ("CONV_WIDTH", 4), ("KEY_DIM", 128)];
        let kernel = gpu.kernel(&REPLAY, Self::KERNEL, &defines)?;
        let grid = [(rows as u32).div_ceil(THREADS).max(1), 1, 1];
        let launch = KernelLaunch::new(kernel, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(&mut arrays.cu)
            .out(&mut arrays.write)
            .out(&mut arrays.first_rows)
            .arg(cu_q)
            .arg(facts)
            .u32(facts.stride() as u32)
            .u32(rows as u32)
            .u32(arrays.first_rows.cols() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for ReplayInputWrite<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { arrays, tokens, x, qkv, beta, decay, a_log, dt_bias, layout, layer } = self;
        let defines = [
            ("ACT_F32", gpu.act_f32(Self::KERNEL, x.dtype())?),
            ("CONV_WIDTH", layout.conv_width as u32),
            ("KEY_DIM", key_dim(gpu, layout)?),
        ];
        let columns = arrays.conv_inputs.cols() + arrays.keys_values.cols() + layout.value_heads;
        let first = layer * arrays.tokens(layout);
        let [conv_inputs, keys_values, gates] =
            [&arrays.conv_inputs, &arrays.keys_values, &arrays.gates]
                .map(|array| array.as_ref().row_ptr(first));
        let kernel = gpu.kernel(&REPLAY, Self::KERNEL, &defines)?;
        let grid = [(columns as u32).div_ceil(THREADS), tokens as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, THREADS, 0)
            .overlaps_predecessor()
            .arg_ptr(conv_inputs)
            .arg_ptr(keys_values)
            .arg_ptr(gates)
            .arg(x)
            .arg(qkv)
            .arg(beta)
            .arg(decay)
            .arg(a_log)
            .arg(dt_bias)
            .u32(layout.conv_channels() as u32)
            .u32(layout.key_channels() as u32)
            .u32(layout.value_heads as u32)
            .u32(x.stride() as u32)
            .u32(qkv.stride() as u32)
            .u32(beta.stride() as u32)
            .u32(decay.stride() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for StateReplay<'_, '_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { pool, layout, inputs, arrays, facts, rows, replays, positions, latest } = self;
        let activations = inputs.conv_inputs.dtype();
        let defines = [
            ("ACT_F32", gpu.act_f32(Self::KERNEL, activations)?),
            ("CONV_WIDTH", layout.conv_width as u32),
            ("KEY_DIM", key_dim(gpu, layout)?),
        ];
        let threads = SLICE_WARPS as u32 * gpu.warp_size();
        let rule_blocks = rule_blocks(Self::KERNEL, layout)?;
        let conv_blocks = (layout.conv_channels() as u32).div_ceil(threads);
        let strides = StateStrides::of(layout);
        let kernel = gpu.kernel(&REPLAY, Self::KERNEL, &defines)?;
        let grid = [rule_blocks + conv_blocks, replays as u32, layout.layers as u32];
        let launch = KernelLaunch::new(kernel, grid, threads, 0)
            .overlaps_predecessor()
            .arg_ptr(state_ptr(pool, layout, 0, 0))
            .arg(inputs.conv_inputs.as_ref())
            .arg(inputs.keys_values.as_ref())
            .arg(inputs.gates.as_ref())
            .arg(arrays.first_rows.as_ref())
            .arg(facts)
            .arg(arrays.cu.as_ref())
            .arg(positions)
            .arg(latest)
            .u32(facts.stride() as u32)
            .u32(rows as u32)
            .u32(inputs.tokens(layout) as u32)
            .u32(layout.key_heads as u32)
            .u32(layout.value_heads as u32)
            .u32(layout.value_dim as u32)
            .u32(rule_blocks)
            .u32((layout.conv_offset() / size_of::<f32>()) as u32)
            .arg_words(&[strides.slot])
            .arg_words(&[strides.layer]);
        // SAFETY: the shapes were checked; the host checked the staged rows, state slots and sequence slots; the arguments
        // match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

/// Distances in the state pool, in f32 elements.
struct StateStrides {
    /// Between the states of two slots in a layer.
    slot: u64,
    /// Between the states of two layers in a slot.
    layer: u64,
}

impl StateStrides {
    fn of(layout: &RecurrentStateLayout) -> Self {
        let slot = (layout.bytes_per_layer() / size_of::<f32>()) as u64;
        Self { slot, layer: slot * layout.slots as u64 }
    }
}
