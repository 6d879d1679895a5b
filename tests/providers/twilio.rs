//! Twilio's keys, from constructed parameters by POST and by GET.

use bytes::Bytes;
use http::Request;
use tower_dedup::provider;

use crate::cases::{Outcome, outcome};

fn by_form(parameters: &str) -> Outcome {
    let request = Request::post("/voice");
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    let (head, ()) = request.body(()).unwrap().into_parts();
    outcome(provider::TWILIO, &head, &Bytes::copy_from_slice(parameters.as_bytes()))
}

fn by_query(parameters: &str) -> Outcome {
    let request = Request::get(format!("/voice?{parameters}"));
    outcome(provider::TWILIO, &request.body(()).unwrap().into_parts().0, &Bytes::new())
}

#[test]
fn twilio_keys_contain_the_status_and_prefer_that_of_a_message() {
    for (parameters, key) in [
        ("CallSid=CA1", "|CA1||||"),
        ("AccountSid=AC1&CallSid=CA1&CallStatus=ringing", "AC1|CA1|ringing|||"),
        (
            "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&SequenceNumber=2",
            "AC1|CA1|in-progress|2||",
        ),
        (
            "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1&RecordingStatus=completed",
            "AC1|CA1|||RE1|completed",
        ),
        // A value with the separator in it.
        ("AccountSid=AC1&CallSid=CA1%7Cringing", "AC1|CA1%7Cringing||||"),
        ("AccountSid=AC1&MessageSid=SM1&MessageStatus=sent&SmsStatus=queued", "AC1|SM1|sent"),
        ("AccountSid=AC1&MessageSid=SM1&SmsStatus=received", "AC1|SM1|received"),
        ("MessageSid=SM1", "|SM1|"),
        // A message precedes a call if both are present.
        ("AccountSid=AC1&CallSid=CA1&MessageSid=SM1", "AC1|SM1|"),
        // Fields that Twilio adds to the status of a call or a message, and that make no other kind of it.
        (
            "AccountSid=AC1&CallSid=CA1&CallStatus=completed&ParentCallSid=CA0&SequenceNumber=3\
             &AnsweredBy=human&CallbackSource=call-progress-events&Timestamp=Thu",
            "AC1|CA1|completed|3||",
        ),
        (
            "AccountSid=AC1&CallSid=CA1&CallStatus=ringing&ApplicationSid=AP1&StirVerstat=TN-A",
            "AC1|CA1|ringing|||",
        ),
        (
            "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1&RecordingStatus=completed&RecordingUrl=u",
            "AC1|CA1|||RE1|completed",
        ),
        (
            "AccountSid=AC1&MessageSid=SM1&SmsSid=SM1&SmsMessageSid=SM1&SmsStatus=received\
             &MessagingServiceSid=MG1&OriginalRepliedMessageSid=SM0&Body=StreamSid",
            "AC1|SM1|received",
        ),
        // A message of WhatsApp that was read.
        (
            "AccountSid=AC1&MessageSid=SM1&SmsSid=SM1&MessageStatus=read&EventType=READ\
             &ChannelInstallSid=XE1",
            "AC1|SM1|read",
        ),
    ] {
        for found in [by_form(parameters), by_query(parameters)] {
            assert_eq!(found, Outcome::Key { key: key.to_owned() }, "{parameters}");
        }
    }
}

/// Each group has different events that share the ids of a call or message, or have neither. The fields are those of
/// Twilio's documentation.
const OTHER_KINDS: &[&[&str]] = &[
    // <Stream statusCallback>, <Siprec>, and the call itself.
    &[
        "AccountSid=AC1&CallSid=CA1&StreamSid=MZ1&StreamEvent=stream-started",
        "AccountSid=AC1&CallSid=CA1&StreamSid=MZ1&StreamEvent=stream-stopped",
        "AccountSid=AC1&CallSid=CA1&StreamSid=MZ2&StreamEvent=stream-started",
        "AccountSid=AC1&CallSid=CA1&SiprecSid=SR1&SiprecEvent=siprec-started",
        "AccountSid=AC1&CallSid=CA1&SiprecSid=SR1&SiprecEvent=siprec-stopped",
        "AccountSid=AC1&CallSid=CA1",
    ],
    // Real-time transcriptions, and those of a recording.
    &[
        "AccountSid=AC1&CallSid=CA1&TranscriptionSid=GT1&TranscriptionEvent=transcription-started&SequenceId=1",
        "AccountSid=AC1&CallSid=CA1&TranscriptionSid=GT1&TranscriptionEvent=transcription-content&SequenceId=2",
        "AccountSid=AC1&CallSid=CA1&TranscriptionSid=GT1&TranscriptionEvent=transcription-content&SequenceId=3",
        "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1&TranscriptionSid=TR1&TranscriptionStatus=completed",
        "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1&TranscriptionSid=TR2&TranscriptionStatus=completed",
        "AccountSid=AC1&CallSid=CA1&RecordingSid=RE1",
    ],
    // Conferences, with and without a participant, and their recordings.
    &[
        "AccountSid=AC1&ConferenceSid=CF1&StatusCallbackEvent=conference-start&SequenceNumber=1",
        "AccountSid=AC1&ConferenceSid=CF1&StatusCallbackEvent=conference-end&SequenceNumber=9",
        "AccountSid=AC1&ConferenceSid=CF2&StatusCallbackEvent=conference-end&SequenceNumber=9",
        "AccountSid=AC1&ConferenceSid=CF1&CallSid=CA1&StatusCallbackEvent=participant-join&SequenceNumber=1",
        "AccountSid=AC1&ConferenceSid=CF2&CallSid=CA1&StatusCallbackEvent=participant-join&SequenceNumber=1",
        "AccountSid=AC1&ConferenceSid=CF2&CallSid=CA1&StatusCallbackEvent=participant-mute&SequenceNumber=1",
        "AccountSid=AC1&ConferenceSid=CF1&RecordingSid=RE1&RecordingStatus=completed",
        "AccountSid=AC1&ConferenceSid=CF1&RecordingSid=RE1&RecordingStatus=absent",
        "AccountSid=AC1&CallSid=CA1&SequenceNumber=1",
    ],
    &[
        "ConferenceSid=CF1&CallSid=CA1&SequenceNumber=1",
        "ConferenceSid=CF2&CallSid=CA1&SequenceNumber=1",
    ],
    // Events of a call without an id of their own.
    &[
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&SequenceNumber=0",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&SequenceNumber=0&UnstableSpeechResult=one",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&SequenceNumber=0&UnstableSpeechResult=two",
    ],
    &[
        "AccountSid=AC1&CallSid=CA1",
        "AccountSid=AC1&CallSid=CA1&VirtualAgentStatus=conversation-started",
        "AccountSid=AC1&CallSid=CA1&VirtualAgentStatus=conversation-stopped",
        "AccountSid=AC1&CallSid=CA1&Sid=PK1&For=payment-card-number&Attempt=1",
        "AccountSid=AC1&CallSid=CA1&Sid=PK1&For=payment-card-number&Attempt=2",
        "AccountSid=AC1&CallSid=CA1&PaymentMethod=credit-card&For=postal-code",
        "AccountSid=AC1&CallSid=CA1&SessionId=VX1&SessionStatus=ended",
    ],
    &[
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&DialCallSid=CA2&DialCallStatus=busy",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&DialCallSid=CA3&DialCallStatus=busy",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&DialCallStatus=no-answer",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&QueueSid=QU1&QueueResult=bridged",
        "AccountSid=AC1&CallSid=CA1&CallStatus=in-progress&ReferCallStatus=202",
    ],
    // Conversations, Sync and Chat, whose messages have a MessageSid.
    &[
        "AccountSid=AC1&ConversationSid=CH1&MessageSid=IM1&EventType=onMessageAdded",
        "AccountSid=AC1&ConversationSid=CH1&MessageSid=IM1&EventType=onMessageUpdated&DateUpdated=1",
        "AccountSid=AC1&ConversationSid=CH1&MessageSid=IM1&EventType=onMessageUpdated&DateUpdated=2",
        "AccountSid=AC1&ConversationSid=CH1&MessageSid=IM1&EventType=onDeliveryUpdated&Status=read",
        "AccountSid=AC1&ConversationSid=CH1&ParticipantSid=MB1&EventType=onParticipantAdded",
        "AccountSid=AC1&ServiceSid=IS1&StreamSid=TO1&MessageSid=TZ1&EventType=stream_message_published",
        "AccountSid=AC1&MessageSid=IM1",
    ],
    // Video, TaskRouter, fax, SIMs, usage, the debugger, Proxy, link shortening.
    &[
        "AccountSid=AC1&RoomSid=RM1&StatusCallbackEvent=room-created&SequenceNumber=0",
        "AccountSid=AC1&RoomSid=RM1&StatusCallbackEvent=room-ended&SequenceNumber=1",
        "AccountSid=AC1&RoomSid=RM1&CompositionSid=CJ1&StatusCallbackEvent=composition-available",
        "AccountSid=AC1&WorkspaceSid=WS1&EventType=task.created&ResourceSid=WT1&Sid=EV1",
        "AccountSid=AC1&WorkspaceSid=WS1&EventType=task.created&ResourceSid=WT2&Sid=EV2",
        "AccountSid=AC1&FaxSid=FX1&FaxStatus=delivered",
        "AccountSid=AC1&SimSid=HS1&SimStatus=active",
        "AccountSid=AC1&CommandSid=DC1&CommandStatus=delivered",
        "AccountSid=AC1&UsageTriggerSid=UT1&DateFired=1",
        "AccountSid=AC1&UsageTriggerSid=UT1&DateFired=2",
        "AccountSid=AC1&Sid=NO1&Level=ERROR",
        "AccountSid=AC1&Sid=NO2&Level=ERROR",
        "interactionSid=KI1&interactionSessionSid=KC1&outboundResourceStatus=sent",
        "event_type=click&sms_sid=SM1&account_sid=AC1&link=a&click_time=1",
        "event_type=click&sms_sid=SM1&account_sid=AC1&link=a&click_time=2",
        "AccountSid=AC1&SmsSid=SM1&SmsStatus=sent",
    ],
];

#[test]
fn events_of_other_kinds_have_a_key_each() {
    for group in OTHER_KINDS {
        let mut seen = std::collections::BTreeMap::new();
        for parameters in *group {
            let Outcome::Key { key } = by_form(parameters) else { panic!("no key: {parameters}") };
            assert_eq!(by_query(parameters), Outcome::Key { key: key.clone() }, "{parameters}");
            assert_eq!(seen.insert(key, parameters), None, "{parameters}");
        }
    }
}

/// The order of the fields, equal pairs and the count of retries are no part of an event.
#[test]
fn retry_of_an_event_of_another_kind_has_its_key() {
    for parameters in OTHER_KINDS.iter().copied().flatten() {
        let expected = by_form(parameters);
        let mut fields: Vec<&str> = parameters.split('&').collect();
        fields.reverse();
        assert_eq!(by_form(&fields.join("&")), expected, "{parameters}");
        assert_eq!(by_form(&format!("{parameters}&RetryCount=2")), expected, "{parameters}");
    }
}

/// The key of a status, and the SHA-256 of `AccountSidAC1CallSidCA1StreamEventstream-startedStreamSidMZ1`.
#[test]
fn key_of_another_kind_ends_in_the_digest_of_the_signed_fields() {
    let digest = "fields_0e46dacc869b79da5812fda49bcd20c5f8a2c43584f56db3b394a7ca3f486e7a";
    let key = format!("AC1|CA1|||||{digest}");
    assert_eq!(by_form(OTHER_KINDS[0][0]), Outcome::Key { key });
    let key =
        "AC1|fields_ec3bb81263b16799fb5417c10c7d87e92e2da17c706ffd66cd4ac8a3871cc2bb".to_owned();
    let twice = "AccountSid=AC1&FaxSid=FX1&FaxStatus=delivered&FaxSid=FX1";
    for parameters in
        [&twice[..twice.len() - 11], twice, "\u{feff}AccountSid=AC1&FaxSid=FX1&FaxStatus=delivered"]
    {
        assert_eq!(by_form(parameters), Outcome::Key { key: key.clone() }, "{parameters}");
    }
}

/// No id tells these from another event, or the id is ambiguous.
#[test]
fn request_without_an_id_has_no_key() {
    for parameters in
        ["AccountSid=AC1", "AccountSid=AC1&EventType=x", "Sid=CA1&Digits=1", "a=b", ""]
    {
        assert_eq!(by_form(parameters), Outcome::Missing, "{parameters}");
    }
    for parameters in ["CallSid=CA1&CallSid=CA2&StreamSid=MZ1", "CallSid=+&StreamSid=MZ1"] {
        assert_eq!(by_form(parameters), Outcome::Malformed, "{parameters}");
    }
}
