//! Fuzz target: headers of safetensors files.

use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let Ok(places) = models::tensor_locations(Path::new("x"), data) else { return };
    let mut places: Vec<_> = places.into_iter().map(|(_, place)| place).collect();
    places.sort_unstable_by_key(|place| (place.start, place.end));
    assert!(places.iter().all(|place| place.start <= place.end && place.end <= data.len()));
    assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start), "tensors overlap");
}
