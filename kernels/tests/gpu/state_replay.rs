//! State updates after the verification of draft tokens: the GPU matches the CPU, and a run without draft tokens.

use device::gpu::HalfDtype;
use device::{DeviceDriver, FloatElement};
use device::{bf16, f16};
use kernels::KernelBackend;
use kernels::gpu::GpuBackend;
use std::sync::Arc;

use crate::replay_case::ReplayCase;
use crate::support::{devices, devices_of, error, oracle};

fn replays<T: FloatElement>(devices: &[Arc<GpuBackend>]) {
    for (key_dim, value_dim) in [(64, 24), (128, 32)] {
        let case = ReplayCase::<T>::new(key_dim, value_dim);
        let (on_cpu, conv_on_cpu) = case.parts(&case.replayed(&KernelBackend::from(oracle())));
        for gpu in devices {
            let name = format!("{} {key_dim} x {value_dim}", gpu.name());
            let backend = KernelBackend::from(Arc::clone(gpu));
            let replayed = case.replayed(&backend);
            assert!(replayed == case.expected(&backend), "{name}: bits of a run without drafts");
            let (deltas, conv) = case.parts(&replayed);
            assert!(conv == conv_on_cpu, "{name}");
            // Keys and values of 16 bits may be rounded differently.
            assert!(T::DTYPE.bytes() < 4 || error(&deltas, &on_cpu) < 1e-5, "{name}");
        }
    }
}

#[test]
fn replayed_states_have_the_bits_of_a_plain_run() {
    replays::<f32>(&devices());
    replays::<bf16>(&devices());
    replays::<f16>(&devices_of(HalfDtype::F16));
}
