//! Requests over a socket of our own, whole or broken, and the answers.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Barrier, oneshot};
use tokio::time::{sleep, timeout};

use crate::target::Target;

/// How long an answer may take.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// The largest answer, in bytes.
const LARGEST: usize = 64 << 20;
/// How long a copy waits for the others before its last byte.
const MEETING: Duration = Duration::from_secs(2);

/// A step of writing a request.
#[derive(Debug)]
pub(crate) enum Step {
    Write(Bytes),
    Pause(Duration),
    /// Waits for the other copies.
    Meet(Arc<Barrier>),
    /// Tells that all before was written.
    Tell(oneshot::Sender<()>),
    /// Ends the sending direction, and waits for an answer.
    End,
    /// Closes the connection.
    HangUp,
    /// Resets the connection.
    Reset,
}

/// The answer to a request, or why there is none.
#[derive(Debug)]
pub(crate) struct Answer(pub(crate) Result<(StatusCode, Bytes), String>);

impl Answer {
    pub(crate) fn is_success(&self) -> bool {
        self.status().is_some_and(|status| status.is_success())
    }

    pub(crate) fn status(&self) -> Option<StatusCode> {
        self.0.as_ref().ok().map(|(status, _)| *status)
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok((status, _)) => status.as_u16().fmt(f),
            Err(why) => f.write_str(why),
        }
    }
}

/// The bytes of a head. `Host`, `Connection` and the length are added.
fn head(target: &Target, request: &Request<Bytes>, length: &str) -> Vec<u8> {
    let path = request.uri().path_and_query().map_or("/", |it| it.as_str());
    let mut head = format!("{} {path} HTTP/1.1\r\n", request.method()).into_bytes();
    let agent = ("user-agent", concat!("tower-dedup-judge/", env!("CARGO_PKG_VERSION")));
    let agent = (!request.headers().contains_key(agent.0)).then_some(agent);
    let ours = [("host", target.authority.as_str()), ("connection", "close")];
    for (name, value) in ours.into_iter().chain(agent) {
        head.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    for (name, value) in request.headers() {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(format!("{length}\r\n\r\n").as_bytes());
    head
}

/// Returns the headers that [`head`] writes by itself.
pub(crate) const OWN_HEADERS: [http::HeaderName; 5] = [
    header::HOST,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::EXPECT,
];

/// Returns the bytes of a whole request.
pub(crate) fn whole(target: &Target, request: &Request<Bytes>) -> Bytes {
    let mut bytes = head_of(target, request).to_vec();
    bytes.extend_from_slice(request.body());
    bytes.into()
}

/// Returns the head alone. It promises the body.
pub(crate) fn head_of(target: &Target, request: &Request<Bytes>) -> Bytes {
    head(target, request, &format!("content-length: {}", request.body().len())).into()
}

/// Returns the head and the chunks of a body, without the last chunk, which ends it.
pub(crate) fn chunked(target: &Target, request: &Request<Bytes>) -> Vec<Bytes> {
    let head = head(target, request, "transfer-encoding: chunked");
    let chunk = |data: &[u8]| [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat();
    let body = request.body();
    let chunks = body.chunks(body.len().div_ceil(3).max(1)).map(chunk);
    std::iter::once(head).chain(chunks).map(Bytes::from).collect()
}

/// The end of a chunked body.
pub(crate) const LAST_CHUNK: Bytes = Bytes::from_static(b"0\r\n\r\n");

/// Makes the steps, and reads the answer.
pub(crate) async fn exchange(target: &Target, steps: Vec<Step>) -> Answer {
    let pauses =
        steps.iter().map(|step| if let Step::Pause(time) = step { *time } else { Duration::ZERO });
    let bound = ANSWER + pauses.sum::<Duration>();
    let Ok(answer) = timeout(bound, talk(target, steps)).await else {
        return Answer(Err(format!("no answer within {} s", bound.as_secs())));
    };
    Answer(answer.map_err(|error| format!("no answer ({error})")))
}

async fn talk(target: &Target, steps: Vec<Step>) -> io::Result<(StatusCode, Bytes)> {
    let mut stream = target.connect().await?;
    if matches!(steps.last(), Some(Step::Reset)) {
        stream.set_zero_linger()?;
    }
    let (mut reader, mut writer) = stream.split();
    // A server that refuses a request may answer before its end, and read no more of it.
    let mut reading = std::pin::pin!(read(&mut reader));
    tokio::select! {
        biased;
        written = write(&mut writer, steps) => match written {
            Ok(true) => reading.await,
            Ok(false) => Err(io::Error::other("the client has hung up")),
            Err(error) => reading.await.map_err(|_| error),
        },
        answer = &mut reading => answer,
    }
}

/// Returns `false` if the connection is to be closed.
async fn write(writer: &mut (impl AsyncWrite + Unpin), steps: Vec<Step>) -> io::Result<bool> {
    for step in steps {
        match step {
            Step::Write(bytes) => writer.write_all(&bytes).await?,
            Step::Pause(time) => sleep(time).await,
            Step::Meet(barrier) => drop(timeout(MEETING, barrier.wait()).await),
            Step::Tell(sent) => drop(sent.send(())),
            Step::End => writer.shutdown().await?,
            Step::HangUp | Step::Reset => return Ok(false),
        }
    }
    Ok(true)
}

/// Reads an answer to its end, and passes over 1xx.
async fn read(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<(StatusCode, Bytes)> {
    let mut input = Vec::new();
    loop {
        let mut headers = [httparse::EMPTY_HEADER; 128];
        let mut head = httparse::Response::new(&mut headers);
        let parsed = head.parse(&input).map_err(io::Error::other)?;
        let httparse::Status::Complete(length) = parsed else {
            more(reader, &mut input).await?;
            continue;
        };
        let status = head.code.and_then(|code| StatusCode::from_u16(code).ok());
        let status = status.ok_or_else(|| io::Error::other("no status"))?;
        let value = |name: &str| {
            let found = head.headers.iter().find(|it| it.name.eq_ignore_ascii_case(name))?;
            std::str::from_utf8(found.value).ok()
        };
        let is_chunked = value("transfer-encoding").is_some();
        let content_length = value("content-length").and_then(|value| value.parse::<usize>().ok());
        input.drain(..length);
        if status.is_informational() {
            continue;
        }
        let is_empty = [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        let body = match content_length {
            _ if is_empty => Vec::new(),
            _ if is_chunked => loop {
                if let Some(body) = unchunked(&input)? {
                    break body;
                }
                more(reader, &mut input).await?;
            },
            Some(length) => {
                while input.len() < length {
                    more(reader, &mut input).await?;
                }
                input.truncate(length);
                input
            }
            None => {
                while more(reader, &mut input).await.is_ok() {}
                input
            }
        };
        return Ok((status, body.into()));
    }
}

async fn more(reader: &mut (impl AsyncRead + Unpin), input: &mut Vec<u8>) -> io::Result<()> {
    if input.len() > LARGEST {
        return Err(io::Error::other("the answer is too large"));
    }
    match reader.read_buf(input).await? {
        0 => Err(io::Error::other("the connection was closed")),
        _ => Ok(()),
    }
}

/// Returns the data of a chunked body, once it is complete.
fn unchunked(mut input: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let malformed = || io::Error::other("a chunk is malformed");
    let mut body = Vec::new();
    loop {
        match httparse::parse_chunk_size(input).map_err(|_| malformed())? {
            httparse::Status::Partial => return Ok(None),
            httparse::Status::Complete((_, 0)) => return Ok(Some(body)),
            httparse::Status::Complete((start, size)) => {
                let size = usize::try_from(size).map_err(|_| malformed())?;
                let Some(rest) =
                    input.get(start..).filter(|rest| rest.len() >= size.saturating_add(2))
                else {
                    return Ok(None);
                };
                body.extend_from_slice(&rest[..size]);
                input = &rest[size + 2..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answer_is_read_to_its_end_in_each_form() {
        type Case = (&'static [u8], Option<(u16, &'static str)>);
        let cases: [Case; 8] = [
            (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokMORE", Some((200, "ok"))),
            (b"HTTP/1.0 500 Oops\r\n\r\nto the end", Some((500, "to the end"))),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", Some((204, ""))),
            (
                b"HTTP/1.1 201 C\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
                Some((201, "abc")),
            ),
            (b"HTTP/1.1 201 C\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", None),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nok", None),
            (b"nonsense\r\n\r\n", None),
            (b"", None),
        ];
        for (input, expected) in cases {
            let (mut client, mut server) = tokio::io::duplex(1 << 16);
            server.write_all(input).await.unwrap();
            drop(server);
            let answer = read(&mut client).await.ok();
            let expected = expected
                .map(|(code, body)| (StatusCode::from_u16(code).unwrap(), Bytes::from(body)));
            assert_eq!(answer, expected, "{}", String::from_utf8_lossy(input));
        }
    }
}
