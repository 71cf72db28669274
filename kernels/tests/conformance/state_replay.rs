//! State updates after the verification of draft tokens on the CPU: the states have the bits of a run of the accepted
//! tokens alone, which `recurrent.rs` compares with f64.

use device::{FloatElement, bf16, f16};
use kernels::KernelBackend;

use crate::replay_case::ReplayCase;
use crate::support::devices;

fn replays<T: FloatElement>() {
    for (key_dim, value_dim) in [(20, 24), (64, 8)] {
        let case = ReplayCase::<T>::new(key_dim, value_dim);
        for threads in [1, 3] {
            for device in devices(threads) {
                let name = format!("{device:?} {key_dim} x {value_dim}");
                let device = KernelBackend::from(device);
                let (replayed, expected) = (case.replayed(&device), case.expected(&device));
                assert_eq!(case.parts(&replayed).0, case.parts(&expected).0, "{name}");
                assert!(replayed == expected, "{name}");
            }
        }
    }
}

#[test]
fn replayed_states_have_the_bits_of_a_plain_run() {
    replays::<f32>();
    replays::<bf16>();
    replays::<f16>();
}
