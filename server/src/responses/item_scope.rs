//! Scope of an item id: the part that names the objects that store the item, so that a reference to the item
//! can be resolved.
//!
//! Ids: `msg_<response>_<number>`, `msg_<conversation>_<number>`, or `msg_<response>_<conversation>_<number>`
//! for items of a response that extends a conversation; each part is the hexadecimal part of an object id.

/// Part of item ids that identifies their response: the hexadecimal parts of the ids of the response and
/// its conversation, joined by `_`.
#[derive(Debug, Clone)]
pub(super) struct ItemIdScope(String);

impl ItemIdScope {
    /// Creates the scope of the items of a response. `conversation` is the id of the conversation that the
    /// response extends.
    pub(super) fn new(response_hex: &str, conversation: Option<&str>) -> Self {
        match conversation.and_then(|id| id.strip_prefix("conv_")) {
            Some(conversation_hex) => Self(format!("{response_hex}_{conversation_hex}")),
            None => Self(response_hex.to_owned()),
        }
    }

    /// Returns the scope as part of an item id.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns the hexadecimal parts of the ids of the objects that may contain the item `item_id`; empty if the
/// id does not have the form of this server's item ids.
pub(super) fn object_hexes_of(item_id: &str) -> Vec<&str> {
    let parts: Vec<&str> = item_id.splitn(5, '_').collect();
    let (hexes, number) = match parts.as_slice() {
        [_, hexes @ .., number] if (1..=2).contains(&hexes.len()) => (hexes, *number),
        _ => return Vec::new(),
    };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let is_hex = |hex: &&str| !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_number && hexes.iter().all(is_hex) { hexes.to_vec() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_ids_name_their_objects() {
        let scope = ItemIdScope::new("0a1b", Some("conv_22"));
        assert_eq!(object_hexes_of(&format!("msg_{}_15", scope.as_str())), ["0a1b", "22"]);
        assert_eq!(ItemIdScope::new("0a1b", None).as_str(), "0a1b");
        assert_eq!(object_hexes_of("rs_0a1b_15"), ["0a1b"]);
        for foreign in [
            "msg_0a1b",
            "msg_xyz_1",
            "msg_0a1b_",
            "0a1b_1",
            "rs__1",
            "",
            "msg_0a_22_3_4",
            "fc_0a__1",
        ] {
            assert!(object_hexes_of(foreign).is_empty(), "{foreign}");
        }
    }
}
