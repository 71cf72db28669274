//! Embedding lookups and row gathers of the GPU copy rows byte for byte.

use device::bf16;
use kernels::{RowGather, TokenEmbedding};

use crate::support::{DeviceArray, GpuTestFloat, RandomNumbers, S, devices};

fn lookups<T: GpuTestFloat>(vocabulary: usize, hidden: usize) {
    let table = RandomNumbers::fresh(hidden as u64).reals::<T>(vocabulary * hidden);
    let last = vocabulary as i32 - 1;
    let ids = [0, last, 33, 5, 5, last + 1, -1, 31, i32::MAX, i32::MIN];
    for device in devices() {
        let on_device = DeviceArray::of(&device, &table, vocabulary, hidden);
        let indices = DeviceArray::row(&device, &ids);
        for first in [0, 3] {
            let expected: Vec<T> = ids
                .iter()
                .flat_map(|&id| {
                    let row = usize::try_from(i64::from(id) - first as i64).ok();
                    let row = row.filter(|r| *r < vocabulary);
                    (0..hidden).map(move |d| row.map_or(0, |r| r * hidden + d + 1))
                })
                .map(|at| if at == 0 { T::of(0.0) } else { table[at - 1] })
                .collect();
            let mut y = DeviceArray::<T>::poisoned(&device, ids.len(), hidden);
            device
                .launch(
                    &S,
                    TokenEmbedding {
                        y: y.mat_mut(),
                        ids: indices.mat(),
                        table: on_device.mat(),
                        first,
                    },
                )
                .unwrap();
            assert_eq!(y.read(&device), expected, "{} {hidden} columns", device.arch());
            if first == 0 {
                let mut y = DeviceArray::<T>::poisoned(&device, ids.len(), hidden);
                device
                    .launch(
                        &S,
                        RowGather { y: y.mat_mut(), x: on_device.mat(), rows: indices.mat() },
                    )
                    .unwrap();
                assert_eq!(y.read(&device), expected, "gathered");
            }
        }
    }
}

#[test]
fn lookups_copy_rows() {
    lookups::<f32>(70, 34);
    lookups::<bf16>(70, 33);
    lookups::<bf16>(70, 2056);
}
