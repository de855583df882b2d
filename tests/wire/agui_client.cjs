// Drives the official AG-UI client against a chat URL, as a program that uses it would.
//
// stdin: {"url", "threadId", "turns": [{"text", "abortAfter"?}]}; "abortAfter" stops the run after
// that many events. stdout: {"messages", "turns": [{"events", "error", "outcome"}], "warnings"}.
// The client checks order and shape of every event itself: what it refuses is an "error", what
// it does not know is a warning.
'use strict'
const { createRequire } = require('node:module')
const path = require('node:path')

const modules = process.env.CHATKEEP_TEST_NODE_MODULES
if (!modules) throw new Error('CHATKEEP_TEST_NODE_MODULES must name a node_modules folder')
const { HttpAgent } = createRequire(path.join(modules, 'anchor.js'))('@ag-ui/client')

const warnings = []
const note = (...words) => warnings.push(words.map(String).join(' '))
console.warn = note
console.error = note

async function read(stream) {
  let text = ''
  for await (const piece of stream) text += piece
  return JSON.parse(text)
}

async function main() {
  const job = await read(process.stdin)
  const agent = new HttpAgent({ url: job.url, threadId: job.threadId })
  const turns = []
  for (const turn of job.turns) {
    const seen = { events: [], error: null, outcome: null, runId: null }
    agent.addMessage({ id: `user-${crypto.randomUUID()}`, role: 'user', content: turn.text })
    try {
      await agent.runAgent({}, {
        onEvent: ({ event, input }) => {
          seen.runId = input.runId
          seen.events.push(event.type)
          if (seen.events.length === turn.abortAfter) agent.abortRun()
        },
        onRunErrorEvent: ({ event }) => { seen.outcome = `error: ${event.message}` },
        onRunFinishedEvent: ({ outcome }) => { seen.outcome = outcome },
        onRunFailed: ({ error }) => { seen.error = String(error) },
      })
    } catch (error) {
      seen.error = String(error)
    }
    turns.push(seen)
  }
  process.stdout.write(JSON.stringify({ messages: agent.messages, turns, warnings }))
}

main()
