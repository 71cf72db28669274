//! Slab: a vector of requests with reusable slots. Steps address a request by its index instead of a hash
//! lookup.

/// Index of a request in its replica's slab (vector of requests). The index is reused after the request
/// finishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlabSlot(pub(crate) u32);

/// Stores requests in slots that are reused after removal.
#[derive(Debug)]
pub(crate) struct RequestSlab<T> {
    slots: Vec<Option<T>>,
    free: Vec<SlabSlot>,
}

impl<T> RequestSlab<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn insert(&mut self, value: T) -> SlabSlot {
        if let Some(slot) = self.free.pop() {
            self.slots[slot.0 as usize] = Some(value);
            return slot;
        }
        self.slots.push(Some(value));
        SlabSlot(self.slots.len() as u32 - 1)
    }

    pub(crate) fn remove(&mut self, slot: SlabSlot) -> T {
        self.free.push(slot);
        self.slots[slot.0 as usize].take().expect("a removed slot is occupied")
    }

    #[inline]
    pub(crate) fn get(&self, slot: SlabSlot) -> Option<&T> {
        self.slots.get(slot.0 as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: SlabSlot) -> Option<&mut T> {
        self.slots.get_mut(slot.0 as usize)?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlabSlot, &T)> {
        let numbered = self.slots.iter().enumerate();
        numbered.filter_map(|(i, value)| Some((SlabSlot(i as u32), value.as_ref()?)))
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

impl<T> std::ops::Index<SlabSlot> for RequestSlab<T> {
    type Output = T;

    #[inline]
    fn index(&self, slot: SlabSlot) -> &T {
        self.get(slot).expect("a listed slot is occupied")
    }
}

impl<T> std::ops::IndexMut<SlabSlot> for RequestSlab<T> {
    #[inline]
    fn index_mut(&mut self, slot: SlabSlot) -> &mut T {
        self.get_mut(slot).expect("a listed slot is occupied")
    }
}
