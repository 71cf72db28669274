//! KV pool: device memory of the paged KV cache on one rank, and of recurrent states. The scheduler allocates its blocks
//! and state slots.

use std::cell::{Ref, RefCell, RefMut};
use std::ops::Range;

use device::{Buffer, DType, DeviceError};
use kernels::{KvLayout, MlaKvLayout, RecurrentStateLayout};

use crate::error::check_size;
use crate::replay_buffers::{ReplayBufferLimits, ReplayBuffers};
use crate::{OpError, Ops};

/// Layout of a KV pool: what it stores per token and layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvPoolLayout {
    /// Multi-head or grouped-query attention: keys and values of the KV heads of this rank.
    Heads(KvLayout),
    /// As `Heads`, but the layers of KV group 0 have other KV heads than those of the further groups.
    HeadsByGroup(GroupedKvLayouts),
    /// MLA: one row of compressed KV and rotary key, from which all heads compute their keys and values.
    Mla(MlaKvLayout),
}

/// Layouts of a pool in which the layers of KV group 0 and those of the further groups have keys and values of
/// different sizes. A block has the same bytes for all groups: for each pool layer, those of one or several layers of a
/// group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedKvLayouts {
    /// Layers of KV group 0.
    pub first: GroupKvLayout,
    /// Layers of the groups from 1 on.
    pub further: GroupKvLayout,
}

/// Layout of a KV pool for the layers of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupKvLayout {
    /// Sizes of the pool if all layers had this size; `layers` is a multiple of `layers_per_slot`.
    pub heads: KvLayout,
    /// Number of layers whose keys and values fill one pool layer of a block.
    pub layers_per_slot: usize,
}

impl GroupKvLayout {
    /// Bytes of the keys and values of one layer in one block.
    const fn layer_bytes(&self) -> usize {
        self.heads.bytes_per_block() / self.heads.layers
    }

    /// Returns the place of layer `layer` of a group. Its block ids are multiples of `layers_per_slot`.
    fn place(&self, layer: usize) -> KvLayerPlace {
        let (per_slot, blocks) = (self.layers_per_slot, self.heads.blocks);
        let first = layer / per_slot * blocks * per_slot + layer % per_slot;
        let ids = blocks.saturating_sub(1) * per_slot + 1;
        let layout = KvLayout { layers: 1, blocks: ids, ..self.heads };
        let start = first * self.layer_bytes();
        KvLayerPlace { memory: 0, layout, layer: 0, bytes: start..start + layout.bytes() }
    }
}

/// Part of a KV pool that has the keys and values of a layer.
pub(crate) struct KvLayerPlace {
    /// Index in the pool of the memory with the layer.
    pub(crate) memory: usize,
    /// Layout of the part.
    pub(crate) layout: KvLayout,
    /// Index of the layer in the part.
    pub(crate) layer: usize,
    /// Bytes of the part.
    pub(crate) bytes: Range<usize>,
}

/// Part of an MLA KV pool that has the compressed KV of a layer.
pub(crate) struct MlaLayerPlace {
    /// Index in the pool of the memory with the layer.
    pub(crate) memory: usize,
    /// Layout of the part.
    pub(crate) layout: MlaKvLayout,
    /// Index of the layer in the part.
    pub(crate) layer: usize,
}

impl GroupedKvLayouts {
    fn check(&self) -> Result<(), DeviceError> {
        let Self { first, further } = self;
        for GroupKvLayout { heads, layers_per_slot } in [first, further] {
            heads.check()?;
            device::check_size("kv layout", "layers", heads.layers % (*layers_per_slot).max(1), 0)?;
        }
        let bytes = [first, further].map(|layout| layout.heads.bytes_per_block());
        device::check_size("kv layout", "bytes of a block", bytes[1], bytes[0])
    }

    const fn of_group(&self, group: usize) -> &GroupKvLayout {
        if group == 0 { &self.first } else { &self.further }
    }
}

impl KvPoolLayout {
    /// Distance between the ids of successive blocks of the pool in the block tables and KV slots of group `group`.
    #[must_use]
    pub const fn block_id_step(&self, group: usize) -> usize {
        match self {
            Self::HeadsByGroup(layouts) => layouts.of_group(group).layers_per_slot,
            Self::Heads(_) | Self::Mla(_) => 1,
        }
    }

    /// Number of layers of the pool.
    const fn pool_layers(&self) -> usize {
        match self {
            Self::Heads(layout) => layout.layers,
            Self::HeadsByGroup(GroupedKvLayouts { first, .. }) => {
                first.heads.layers / first.layers_per_slot
            }
            Self::Mla(layout) => layout.layers,
        }
    }

    /// Checks that kernels support this layout.
    pub fn check(&self) -> Result<(), DeviceError> {
        match self {
            Self::Heads(layout) => layout.check(),
            Self::HeadsByGroup(layouts) => layouts.check(),
            Self::Mla(layout) => layout.check(),
        }
    }

    /// Size of the pool in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        match self {
            Self::Heads(layout) => layout.bytes(),
            Self::HeadsByGroup(layouts) => layouts.first.heads.bytes(),
            Self::Mla(layout) => layout.bytes(),
        }
    }

    /// Number of blocks in the pool.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        match self {
            Self::Heads(layout) => layout.blocks,
            Self::HeadsByGroup(layouts) => layouts.first.heads.blocks,
            Self::Mla(layout) => layout.blocks,
        }
    }

    /// Size of one block over all layers, in bytes.
    #[must_use]
    pub const fn bytes_per_block(&self) -> usize {
        match self {
            Self::Heads(layout) => layout.bytes_per_block(),
            Self::HeadsByGroup(layouts) => layouts.first.heads.bytes_per_block(),
            Self::Mla(layout) => layout.bytes_per_block(),
        }
    }
}

impl From<KvLayout> for KvPoolLayout {
    fn from(layout: KvLayout) -> Self {
        Self::Heads(layout)
    }
}

impl From<MlaKvLayout> for KvPoolLayout {
    fn from(layout: MlaKvLayout) -> Self {
        Self::Mla(layout)
    }
}

/// Paged KV cache of all layers, with a fixed number of blocks.
///
/// A shared reference suffices for writes, because a forward pass stores keys and reads them through the same
/// reference. Each op borrows the bytes for its own duration, on the one thread that owns the device. `Send`,
/// not `Sync`.
#[derive(Debug)]
pub struct KvPool {
    /// One buffer with all layers, or one buffer per layer in the memory of a foreign host.
    memory: Vec<RefCell<Buffer>>,
    layout: KvPoolLayout,
    states: Option<DeviceStatePool>,
}

/// Recurrent states of all layers that have them, with a fixed number of state slots.
#[derive(Debug)]
pub(crate) struct DeviceStatePool {
    pub(crate) bytes: RefCell<Buffer>,
    pub(crate) layout: RecurrentStateLayout,
    replay: Option<RefCell<ReplayBuffers>>,
}

impl DeviceStatePool {
    /// Returns the buffers for rows with draft tokens.
    pub(crate) fn replay(&self, op: &'static str) -> Result<&RefCell<ReplayBuffers>, OpError> {
        let missing = OpError::Pool { op, stores: "no inputs of rows with draft tokens" };
        self.replay.as_ref().ok_or(missing)
    }
}

impl KvPool {
    /// Allocates the memory of the pool on the device, zeroed.
    pub fn new(ops: &Ops, layout: impl Into<KvPoolLayout>) -> Result<Self, OpError> {
        let layout = layout.into();
        layout.check()?;
        let memory = vec![RefCell::new(ops.device.alloc(layout.bytes())?)];
        Ok(Self { memory, layout, states: None })
    }

    /// Returns a pool over the memory of a foreign host, which has one buffer per layer. `layers` are the buffers in the
    /// order of the layers, each with the bytes of its layer in `layout`.
    ///
    /// Errors: the number of buffers or the size of one of them does not fit the layout, or the layers of the pool have
    /// different sizes.
    pub fn foreign(layers: Vec<Buffer>, layout: impl Into<KvPoolLayout>) -> Result<Self, OpError> {
        const OP: &str = "foreign KV pool";
        let layout = layout.into();
        layout.check()?;
        if let KvPoolLayout::HeadsByGroup(_) = layout {
            return Err(OpError::Pool { op: OP, stores: "layers of different sizes" });
        }
        let count = layout.pool_layers();
        check_size(OP, "layers", layers.len(), count)?;
        let layer_bytes = layout.bytes() / count.max(1);
        if let Some((layer, buffer)) = (0..).zip(&layers).find(|(_, b)| b.bytes() < layer_bytes) {
            let (got, expected) = (vec![layer, buffer.bytes()], vec![layer, layer_bytes]);
            return Err(OpError::Shape { op: OP, what: "layer and its bytes", got, expected });
        }
        let memory = layers.into_iter().map(RefCell::new).collect();
        Ok(Self { memory, layout, states: None })
    }

    /// Whether each layer has its own memory.
    fn is_foreign(&self) -> bool {
        self.memory.len() > 1 || self.layout.pool_layers() == 1
    }

    /// Allocates the memory of recurrent states, in addition to the paged KV cache; `None` = the model has no such
    /// states.
    pub fn with_states(
        mut self,
        ops: &Ops,
        layout: Option<RecurrentStateLayout>,
    ) -> Result<Self, OpError> {
        let allocate = |layout: RecurrentStateLayout| -> Result<_, OpError> {
            layout.check()?;
            let bytes = RefCell::new(ops.device.alloc(layout.bytes())?);
            Ok(DeviceStatePool { bytes, layout, replay: None })
        };
        self.states = layout.map(allocate).transpose()?;
        Ok(self)
    }

    /// Allocates the buffers for rows with draft tokens, if the pool has recurrent states.
    pub fn with_replay(mut self, ops: &Ops, limits: ReplayBufferLimits) -> Result<Self, OpError> {
        if let Some(states) = &mut self.states {
            let buffers = ReplayBuffers::new(ops, &states.layout, limits)?;
            states.replay = Some(RefCell::new(buffers));
        }
        Ok(self)
    }

    pub(crate) fn states(&self, op: &'static str) -> Result<&DeviceStatePool, OpError> {
        self.states.as_ref().ok_or(OpError::Pool { op, stores: "no recurrent states" })
    }

    /// Returns the layout of the pool: layers, blocks, heads and element type.
    #[must_use]
    pub fn layout(&self) -> &KvPoolLayout {
        &self.layout
    }

    /// Returns the part of the pool that has the keys and values of layer `layer` of KV group `group`.
    pub(crate) fn place(
        &self,
        op: &'static str,
        group: usize,
        layer: usize,
    ) -> Result<KvLayerPlace, OpError> {
        match &self.layout {
            KvPoolLayout::Heads(layout) if self.is_foreign() => {
                check_index(op, "layer", layer, self.memory.len())?;
                let layout = KvLayout { layers: 1, ..*layout };
                Ok(KvLayerPlace { memory: layer, layout, layer: 0, bytes: 0..layout.bytes() })
            }
            KvPoolLayout::Heads(layout) => {
                Ok(KvLayerPlace { memory: 0, layout: *layout, layer, bytes: 0..layout.bytes() })
            }
            KvPoolLayout::HeadsByGroup(layouts) => {
                let layout = layouts.of_group(group);
                check_index(op, "layer", layer, layout.heads.layers)?;
                Ok(layout.place(layer))
            }
            KvPoolLayout::Mla(_) => Err(OpError::Pool { op, stores: "compressed KV (MLA)" }),
        }
    }

    pub(crate) fn mla_layout(&self, op: &'static str) -> Result<&MlaKvLayout, OpError> {
        match &self.layout {
            KvPoolLayout::Mla(layout) => Ok(layout),
            KvPoolLayout::Heads(_) | KvPoolLayout::HeadsByGroup(_) => {
                Err(OpError::Pool { op, stores: "keys and values" })
            }
        }
    }

    /// Returns the part of the pool that has the compressed KV of layer `layer`.
    pub(crate) fn mla_place(
        &self,
        op: &'static str,
        layer: usize,
    ) -> Result<MlaLayerPlace, OpError> {
        let layout = *self.mla_layout(op)?;
        if !self.is_foreign() {
            return Ok(MlaLayerPlace { memory: 0, layout, layer });
        }
        check_index(op, "layer", layer, self.memory.len())?;
        let layout = MlaKvLayout { layers: 1, ..layout };
        Ok(MlaLayerPlace { memory: layer, layout, layer: 0 })
    }

    /// Returns memory `index` of the pool, which a place names.
    pub(crate) fn read(&self, index: usize) -> Ref<'_, Buffer> {
        self.memory[index].borrow()
    }

    /// Returns memory `index` of the pool, which a place names, for writing.
    pub(crate) fn write(&self, index: usize) -> RefMut<'_, Buffer> {
        self.memory[index].borrow_mut()
    }

    /// Reads the compressed KV and the rotary key of one slot as f32, for comparison in tests.
    pub fn read_mla_row(&self, ops: &Ops, layer: usize, slot: usize) -> Result<Vec<f32>, OpError> {
        let MlaLayerPlace { memory, layout, layer } = self.mla_place("read_mla_row", layer)?;
        check_index("read_mla_row", "layer", layer, layout.layers)?;
        check_index("read_mla_row", "slot", slot, layout.slots())?;
        let size = layout.dtype.bytes();
        let mut bytes = vec![0; layout.width() * size];
        let at = layout.row(layer, slot) * size;
        ops.device.download(&ops.stream, &self.read(memory), at, &mut bytes)?;
        let mut row = vec![0.0; layout.width()];
        kernels::HostMat::new(&bytes, layout.dtype, 1, row.len())?.read_row(0, &mut row);
        Ok(row)
    }

    /// Reads the key and the value of one slot and head of a layer of KV group `group` as f32, for comparison in tests
    /// and for transfers. For an fp8 KV pool, returns the stored values decoded as OCP E4M3, not multiplied by the
    /// scale.
    pub fn read_slot(
        &self,
        ops: &Ops,
        [group, layer]: [usize; 2],
        slot: usize,
        head: usize,
    ) -> Result<(Vec<f32>, Vec<f32>), OpError> {
        let KvLayerPlace { memory, layout, layer, bytes } =
            self.place("read_slot", group, layer)?;
        check_index("read_slot", "layer", layer, layout.layers)?;
        check_index("read_slot", "slot", slot, layout.slots())?;
        check_index("read_slot", "head", head, layout.kv_heads)?;
        let (block, t) = (slot / layout.block_tokens, slot % layout.block_tokens);
        let first = bytes.start / layout.dtype.bytes();
        let at = |i: usize| self.read_element(ops, memory, layout.dtype, first + i);
        let (key, value) =
            (layout.key_tile(layer, block, head), layout.value_tile(layer, block, head));
        let channels = 0..layout.head_dim;
        Ok((
            channels.clone().map(|d| at(key + layout.key(t, d))).collect::<Result<_, _>>()?,
            channels.map(|d| at(value + layout.value(t, d))).collect::<Result<_, _>>()?,
        ))
    }

    /// Sets all keys and values in block `block` to NaN, as other requests may leave there, for tests.
    pub fn poison_block(&self, ops: &Ops, block: usize) -> Result<(), OpError> {
        check_index("poison_block", "block", block, self.layout.blocks())?;
        let layers = self.layout.pool_layers();
        // All bits set are a NaN in every type.
        let nan = vec![u8::MAX; self.layout.bytes_per_block() / layers];
        for layer in 0..layers {
            let (memory, first) = if self.is_foreign() { (layer, 0) } else { (0, layer) };
            let at = (first * self.layout.blocks() + block) * nan.len();
            ops.device.upload(&mut self.write(memory), at, &nan)?;
        }
        Ok(())
    }

    /// Reads element `index` of memory `memory` of the pool, which has elements of type `dtype`, as f32.
    fn read_element(
        &self,
        ops: &Ops,
        memory: usize,
        dtype: DType,
        index: usize,
    ) -> Result<f32, OpError> {
        let mut raw = [0; 4];
        let size = dtype.bytes();
        ops.device.download(&ops.stream, &self.read(memory), index * size, &mut raw[..size])?;
        Ok(match dtype {
            DType::BF16 => device::bf16::from_le_bytes([raw[0], raw[1]]).to_f32(),
            DType::F16 => device::f16::from_le_bytes([raw[0], raw[1]]).to_f32(),
            DType::F8E4M3 => device::Fp8E4m3::from_bits(raw[0]).to_f32(),
            _ => f32::from_le_bytes(raw),
        })
    }
}

/// Checks that the index of a layer, slot or head is below `limit`.
fn check_index(
    op: &'static str,
    what: &'static str,
    index: usize,
    limit: usize,
) -> Result<(), OpError> {
    if index >= limit {
        let (got, expected) = (vec![index], vec![limit]);
        return Err(OpError::Shape { op, what, got, expected });
    }
    Ok(())
}
