//! [`SlotMap`]: which primary holds which slots of a cluster.

use std::collections::BTreeMap;

use redis::Value;

use super::super::url::Address;

/// The slots of a store without a cluster.
pub(super) const ALL_SLOTS: (u16, u16) = (0, 16_383);

/// Primaries, each with the ranges of its slots: the first and the last slot.
pub(super) type Shards = Vec<(Address, Vec<(u16, u16)>)>;

/// The primaries by their slots, as one node of the cluster names them.
#[derive(Debug)]
pub(super) struct SlotMap {
    /// The last slot of each range, with its first slot and its primary.
    ranges: BTreeMap<u16, (u16, Address)>,
    replicas: Vec<Address>,
}

impl SlotMap {
    /// Reads the reply to `CLUSTER SLOTS` of the node at `asked`. Returns `None` for a reply without any
    /// slots.
    pub(super) fn read(reply: Value, asked: &Address) -> Option<Self> {
        let Value::Array(rows) = reply else { return None };
        let mut map = Self { ranges: BTreeMap::new(), replicas: Vec::new() };
        for row in rows {
            let Value::Array(row) = row else { return None };
            let mut fields = row.into_iter();
            let (first, last) = (number(&fields.next()?)?, number(&fields.next()?)?);
            let mut nodes = fields.filter_map(|node| address(node, asked));
            // A primary without a port is not known yet.
            let Some(primary) = nodes.next() else { continue };
            map.ranges.insert(last, (first, primary));
            map.replicas.extend(nodes);
        }
        (!map.ranges.is_empty()).then_some(map)
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&Address> {
        let (_, (first, primary)) = self.ranges.range(slot..).next()?;
        (*first <= slot).then_some(primary)
    }

    /// Returns each primary once, in the order of their slots.
    pub(super) fn primaries(&self) -> Vec<Address> {
        distinct(self.ranges.values().map(|(_, primary)| primary))
    }

    /// Returns each primary once, with the ranges of its slots.
    pub(super) fn shards(&self) -> Shards {
        let ranges_of = |primary: &Address| {
            let its = self.ranges.iter().filter(|(_, (_, owner))| owner == primary);
            its.map(|(last, (first, _))| (*first, *last)).collect()
        };
        self.primaries().into_iter().map(|primary| (primary.clone(), ranges_of(&primary))).collect()
    }

    /// Returns each node once, the primaries first.
    pub(super) fn nodes(&self) -> Vec<Address> {
        distinct(self.ranges.values().map(|(_, primary)| primary).chain(&self.replicas))
    }
}

fn distinct<'a>(addresses: impl Iterator<Item = &'a Address>) -> Vec<Address> {
    let mut all: Vec<Address> = Vec::new();
    for address in addresses {
        if !all.contains(address) {
            all.push(address.clone());
        }
    }
    all
}

fn number(value: &Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    }
}

fn address(node: Value, asked: &Address) -> Option<Address> {
    let Value::Array(fields) = node else { return None };
    let port = number(fields.get(1)?).filter(|port| *port > 0)?;
    let host = match fields.first()? {
        Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
        Value::SimpleString(host) => host.clone(),
        // The node does not know its own address.
        Value::Nil => String::new(),
        _ => return None,
    };
    Some(Address { host: asked.host_or_own(&host), port })
}

/// Returns the slot of a key: CRC-16/XMODEM, of the part in braces if there is one.
pub(in super::super) fn slot(key: &[u8]) -> u16 {
    let braced = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}')?;
        (close > 0).then_some(&rest[..close])
    });
    let mut crc: u16 = 0;
    for byte in braced.unwrap_or(key) {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
    }
    crc % 16384
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Address {
        Address { host: "seed".to_owned(), port: 1 }
    }

    fn node(host: &str, port: i64) -> Value {
        let id = Value::BulkString(b"id".to_vec());
        let host = Value::BulkString(host.as_bytes().to_vec());
        Value::Array(vec![host, Value::Int(port), id])
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        // The check value of CRC-16/XMODEM is 0x31C3.
        assert_eq!(slot(b"123456789"), 0x31c3);
        for key in ["a", "foo", "{foo}bar", "x{foo}", "{}foo", "{foo", "a{b}{c}", "dedup:n:evt_1"] {
            let expected = redis::cluster_routing::Slot::for_key(key);
            assert_eq!(redis::cluster_routing::Slot::new(slot(key.as_bytes())), Some(expected));
        }
        assert_eq!(slot(b"{foo}bar"), slot(b"foo"));
    }

    #[test]
    fn owners_are_found_by_slot() {
        let reply = Value::Array(vec![
            range(0, 99, vec![node("a", 1), node("b", 2)]),
            range(200, 16383, vec![node("", 7000), node("b", 2)]),
            range(100, 100, vec![node("a", 1)]),
        ]);
        let map = SlotMap::read(reply, &asked()).unwrap();
        let owner = |slot| map.owner(slot).map(Address::to_string);
        assert_eq!(owner(0).as_deref(), Some("a:1"));
        assert_eq!(owner(100).as_deref(), Some("a:1"));
        assert_eq!(owner(101), None);
        assert_eq!(owner(199), None);
        assert_eq!(owner(16383).as_deref(), Some("seed:7000"));
        let texts = |all: Vec<Address>| all.iter().map(Address::to_string).collect::<Vec<_>>();
        assert_eq!(texts(map.primaries()), ["a:1", "seed:7000"]);
        assert_eq!(texts(map.nodes()), ["a:1", "seed:7000", "b:2"]);
    }

    #[test]
    fn replies_without_slots_are_no_map() {
        assert!(SlotMap::read(Value::Nil, &asked()).is_none());
        assert!(SlotMap::read(Value::Array(Vec::new()), &asked()).is_none());
        let unknown = Value::Array(vec![range(0, 5, vec![node("a", 0)])]);
        assert!(SlotMap::read(unknown, &asked()).is_none());
    }
}
