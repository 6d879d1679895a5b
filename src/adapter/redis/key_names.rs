//! The names of the keys of Redis.
//!
//! The key of an event is `PREFIX:NAMESPACE:ID`. In the namespace, `%`, `{` and `:` are
//! percent-escaped, so the second `:` ends it. In the id, `%` and `{` are: in a cluster, a part in
//! braces would choose the slot, and so let the sender of the event choose the server. A namespace
//! is never empty: `PREFIX::` begins the names that no event has.

use std::borrow::Cow;

use crate::key::DedupKey;

/// Returns the key of Redis for an event.
pub(super) fn name(prefix: &str, key: &DedupKey) -> String {
    let (namespace, id) = (escaped_namespace(key.namespace()), escaped(key.id()));
    [prefix, ":", &*namespace, ":", &*id].concat()
}

/// Returns the event's key; `None` for another key of Redis.
pub(super) fn key(prefix: &str, key_name: &str) -> Option<DedupKey> {
    let (namespace, id) = key_name.strip_prefix(prefix)?.strip_prefix(':')?.split_once(':')?;
    let key = DedupKey::new(&unescaped(namespace), &unescaped(id)).ok()?;
    // Another program may have written a name that this one would not write.
    (name(prefix, &key) == key_name).then_some(key)
}

/// Returns the glob pattern of the keys of one namespace, or of all.
pub(super) fn pattern(prefix: &str, namespace: Option<&str>) -> String {
    let namespace = namespace.map(|it| escaped_namespace(it) + ":").unwrap_or_default();
    let mut pattern = String::new();
    for part in [prefix, ":", &*namespace].concat().chars() {
        if matches!(part, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(part);
    }
    pattern + "*"
}

fn escaped(text: &str) -> Cow<'_, str> {
    if text.contains(['%', '{']) {
        text.replace('%', "%25").replace('{', "%7B").into()
    } else {
        text.into()
    }
}

fn escaped_namespace(namespace: &str) -> String {
    escaped(namespace).replace(':', "%3A")
}

fn unescaped(text: &str) -> String {
    text.replace("%3A", ":").replace("%7B", "{").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_key_is_read_again() {
        let name_of = |namespace, id| name("dedup", &DedupKey::new(namespace, id).unwrap());
        assert_eq!(name_of("github", "a:b"), "dedup:github:a:b");
        assert_eq!(name_of("a:b%3A", "%:{x}"), "dedup:a%3Ab%253A:%25:%7Bx}");
        for namespace in ["a", ":", "%", "%3A", "%253A", "{", "%7B", "*[?]\\^-", "\u{10FFFF}"] {
            for id in ["a", ":", "%3A", ":a:", "{a}", "%7B", "a b", "a\nb"] {
                let expected = DedupKey::new(namespace, id).unwrap();
                assert_eq!(key("dedup", &name_of(namespace, id)), Some(expected));
            }
        }
        let long = format!("dedup:a:{}", "x".repeat(256));
        let foreign =
            ["dedup::0", "dedup:a:%3A", "dedup:", "dedup:a", "dedup:a:", "other:a:b", "a%3a:b"];
        for name in foreign.into_iter().chain([&*long, "dedup:a%:b", "dedup:a:b\0"]) {
            assert_eq!(key("dedup", name), None, "{name}");
        }
    }

    #[test]
    fn pattern_matches_its_prefix_only() {
        assert_eq!(pattern("a-b", None), r"a\-b:*");
        assert_eq!(pattern("a-b", Some("x*[:]\\")), r"a\-b:x\*\[%3A\]\\:*");
    }
}
