//! Decodes KV events from payloads that msgspec 0.22 encoded: event classes of vLLM 0.33 (maps), and arrays
//! as in earlier versions of vLLM.

use metrics::kv_events::KvEventFormat;
use metrics::kv_events::{DecodedKvEvent, ExternalBlockHash, KvEventEncoder, decode};
use protocol::{BlockHash, ExtraKey, KvEvent, KvKind};

/// Hash of a KV block with the token ids [1, 2, 3, 4].
const A: BlockHash = BlockHash(8_356_527_653_647_720_045);

fn encoder(format: KvEventFormat) -> KvEventEncoder {
    let kinds = Vec::new();
    KvEventEncoder { format, rank: 0, block_tokens: 4, medium: "GPU", kinds, token_ids: true }
}

fn stored() -> KvEvent {
    KvEvent::Stored {
        hashes: vec![A],
        parent: None,
        tokens: vec![1, 2, 3, 4],
        extra_keys: vec![Vec::new()],
        group: 0,
    }
}

fn hex(encoder: &KvEventEncoder, event: KvEvent) -> String {
    let bytes = encoder.batch(1.5, &[event]).unwrap();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat()
}

#[test]
fn map_events_match_msgspec_bytes() {
    let map = encoder(KvEventFormat::Map);
    assert_eq!(
        hex(&map, KvEvent::Cleared),
        "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"
    );
    assert_eq!(
        hex(&map, KvEvent::Removed { hashes: vec![A], group: 0 }),
        "93cb3ff80000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391\
         cf73f859a04f669e6da66d656469756da3475055a967726f75705f6964780000"
    );
    assert_eq!(
        hex(&map, stored()),
        "93cb3ff800000000000091de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573\
         91cf73f859a04f669e6db1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304\
         aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0\
         a967726f75705f6964780000"
    );
}

#[test]
fn array_events_have_every_field() {
    let array = encoder(KvEventFormat::Array);
    assert_eq!(
        hex(&array, stored()),
        "93cb3ff8000000000000919cab426c6f636b53746f72656491cf73f859a04f669e6dc0940102030404c0\
         a3475055c0c000c0c000"
    );
    assert_eq!(
        hex(&array, KvEvent::Removed { hashes: vec![A], group: 0 }),
        "93cb3ff80000000000009194ac426c6f636b52656d6f76656491cf73f859a04f669e6da347505500\
         00"
    );
    assert_eq!(
        hex(&array, KvEvent::Cleared),
        "93cb3ff80000000000009191b0416c6c426c6f636b73436c656172656400"
    );
}

#[test]
fn optional_keys_are_written_in_order_or_left_out() {
    let full = KvEventEncoder { kinds: vec![KvKind::Full], ..encoder(KvEventFormat::Map) };
    let salted = KvEvent::Stored {
        hashes: vec![A, BlockHash(300)],
        parent: Some(BlockHash(7)),
        tokens: vec![1; 8],
        extra_keys: vec![vec![ExtraKey::Salt("s".to_owned())], Vec::new()],
        group: 0,
    };
    let text = hex(&full, salted.clone());
    assert!(text.starts_with("93cb3ff800000000000091de000b"), "eleven keys: {text}");
    // Last fields of an encoded event: lora_name nil, extra_keys [["s"], nil], group_idx 0,
    // kv_cache_spec_kind full_attention; then rank 0 of the batch.
    let end = "a96c6f72615f6e616d65c0aa65787472615f6b6579739291a173c0a967726f75705f69647800\
               b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";
    assert!(text.ends_with(&end.replace(' ', "")), "{text}");
    let DecodedKvEvent::BlockStored(back) =
        decode(&full.batch(1.5, &[salted]).unwrap()).unwrap().events.remove(0)
    else {
        panic!("not stored")
    };
    assert_eq!(back.parent_block_hash, Some(ExternalBlockHash::Number(7)));
    assert_eq!(back.extra_keys.unwrap(), [Some(vec!["s".into()]), None]);
    assert_eq!(back.kv_cache_spec_kind.as_deref(), Some("full_attention"));
}

#[test]
fn window_groups_have_their_kind_and_window() {
    for format in [KvEventFormat::Map, KvEventFormat::Array] {
        let kinds = vec![KvKind::Full, KvKind::Window { tokens: 128 }];
        let hybrid = KvEventEncoder { kinds, ..encoder(format) };
        let KvEvent::Stored { hashes, parent, tokens, extra_keys, .. } = stored() else { return };
        let of_group = |group| {
            let (hashes, tokens, extra_keys) = (hashes.clone(), tokens.clone(), extra_keys.clone());
            let event = KvEvent::Stored { hashes, parent, tokens, extra_keys, group };
            let bytes = hybrid.batch(1.5, &[event]).unwrap();
            match decode(&bytes).unwrap().events.remove(0) {
                DecodedKvEvent::BlockStored(stored) => stored,
                other => panic!("{other:?}"),
            }
        };
        let [full, window] = [of_group(0), of_group(1)];
        assert_eq!((full.group_idx, full.kv_cache_spec_sliding_window), (Some(0), None));
        assert_eq!(full.kv_cache_spec_kind.as_deref(), Some("full_attention"));
        assert_eq!((window.group_idx, window.kv_cache_spec_sliding_window), (Some(1), Some(128)));
        assert_eq!(window.kv_cache_spec_kind.as_deref(), Some("sliding_window"));
    }
}

#[test]
fn token_ids_may_be_omitted() {
    let without_token_ids = KvEventEncoder { token_ids: false, ..encoder(KvEventFormat::Map) };
    let text = hex(&without_token_ids, stored());
    assert!(text.contains("a9746f6b656e5f69647390aa626c6f636b5f73697a6504"), "{text}");
}

#[test]
fn vllm_batches_are_decoded_and_broken_ones_rejected() {
    // A batch without a rank, with the event {"type": "BlockRemoved", "block_hashes": [b"\x01\x02", -1],
    // "medium": nil, "new": true}.
    let payload = [
        b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\x84\xa4type\xacBlockRemoved\xacblock_hashes\x92"
            .as_slice(),
        b"\xc4\x02\x01\x02\xff\xa6medium\xc0\xa3new\xc3\xc0",
    ]
    .concat();
    let batch = decode(&payload).unwrap();
    let DecodedKvEvent::BlockRemoved(removed) = &batch.events[0] else { panic!("{batch:?}") };
    assert_eq!(
        removed.block_hashes,
        [ExternalBlockHash::Bytes(vec![1, 2]), ExternalBlockHash::Number(u64::MAX)]
    );
    assert_eq!((&removed.medium, batch.data_parallel_rank), (&None, None));

    let whole = encoder(KvEventFormat::Map).batch(1.5, &[stored()]).unwrap();
    for end in 0..whole.len() {
        assert!(decode(&whole[..end]).is_err(), "cut at {end}");
    }
    let trailing = [whole.as_slice(), b"\xc0"].concat();
    assert!(decode(&trailing).unwrap_err().to_string().contains("1 bytes follow"));
    assert!(decode(b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91\x81\xa4type\xa7Unknown\0").is_err());
}
