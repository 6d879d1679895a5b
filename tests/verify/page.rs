//! The guide's table of what each sender signs.

use tower_dedup::provider::{self, Preset};

use crate::vectors::{senders, signs_time};
use support::secrets::test_secrets;

/// Returns the cells of the sender's row: the sender, the header, what is signed, and what is not.
pub(crate) fn row(sender: Preset) -> [&'static str; 4] {
    let at = senders().iter().position(|other| *other == sender).expect("a scheme");
    rows()[at]
}

fn rows() -> Vec<[&'static str; 4]> {
    let page = include_str!("../../src/docs/verification.md");
    let (_, section) = page.split_once("\n# Who signs what\n").unwrap();
    let (section, _) = section.split_once("\n# ").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
    let cells = |row: &'static str| row.split('|').map(str::trim).collect::<Vec<_>>();
    rows.filter_map(|row| cells(row).try_into().ok()).skip(1).collect()
}

/// `NoScheme` names the section.
#[test]
fn guide_says_what_to_do_for_each_preset_without_a_scheme() {
    let page = include_str!("../../src/docs/verification.md");
    let (_, section) = page.split_once("\n# Senders without a scheme\n").unwrap();
    let (section, _) = section.split_once("\n# ").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let rows: Vec<_> = rows.map(|(name, _)| name.to_lowercase().replace('_', "-")).collect();
    let without = provider::ALL.iter().filter(|preset| preset.scheme().is_none());
    assert_eq!(rows, without.clone().map(Preset::name).collect::<Vec<_>>());
    for preset in without {
        let text = preset.verifier("secret").unwrap_err().to_string();
        assert!(text.contains("/guide/verification/#senders-without-a-scheme"), "{text}");
    }
}

/// One row for each scheme. Other tests read the name of the header from the row.
#[test]
fn guide_lists_what_each_scheme_signs() {
    assert_eq!(rows().len(), senders().len());
    for sender in senders() {
        let [title, _, signed, not_signed] = row(sender);
        let title = title.to_lowercase().replace(", ", "-").replace(' ', "-");
        assert!(title.starts_with(sender.name()), "{title} is not {sender:?}");
        let expected = match (sender.signed_id() == Some(true), signs_time(&sender)) {
            (true, true) => "",
            (true, false) => "time",
            (false, true) => "**id**",
            (false, false) => "**id**, time",
        };
        assert_eq!(not_signed, expected, "{sender:?}");
        let has_word = |word| signed.split([' ', ',']).any(|other| other == word);
        let needs_url = sender.verifier(test_secrets(sender.scheme())[0]).is_err();
        assert_eq!(
            (has_word("time"), has_word("URL")),
            (signs_time(&sender), needs_url),
            "{sender:?}"
        );
    }
}
