// Drives the official AG-UI client against a chat URL, as a program that uses it would.
//
// stdin: {"url", "threadId", "tools"?, "turns": [turn]}. A turn is {"text", "abortAfter"?}, or
// {"answers": {kind: {"status", "payload"?, "metadata"?}}} for every interrupt that waits, by its
// kind (approval, client_tool, generic); "abortAfter" stops the run after that many events,
// "resume" posts these entries as they are, "forget" makes the client believe that nothing waits,
// as a freshly made one does, and "recall" has it remember.
// stdout: {"messages", "turns": [{"events", "error", "outcome", "interrupts", "messages",
// "hydrated", "custom"}], "warnings"}; "hydrated" is the page load that follows the turn.
// The client checks order and shape of every event itself: what it refuses is an "error", what
// it does not know is a warning.
'use strict'
const { createRequire } = require('node:module')
const path = require('node:path')

const modules = process.env.CHATKEEP_TEST_NODE_MODULES
if (!modules) throw new Error('CHATKEEP_TEST_NODE_MODULES must name a node_modules folder')
const { HttpAgent, buildResumeArray } = createRequire(path.join(modules, 'anchor.js'))(
  '@ag-ui/client',
)

const warnings = []
const note = (...words) => warnings.push(words.map(String).join(' '))
console.warn = note
console.error = note

async function read(stream) {
  let text = ''
  for await (const piece of stream) text += piece
  return JSON.parse(text)
}

const kindOf = (interrupt) => interrupt.metadata?.kind ?? 'generic'
const copy = (value) => JSON.parse(JSON.stringify(value))

/** What goes along with a run: answers to everything that waits, or a message. */
function parameters(agent, turn, tools) {
  const base = tools ? { tools } : {}
  if (turn.resume) return { ...base, resume: turn.resume }
  if (!turn.answers) {
    agent.addMessage({ id: `user-${crypto.randomUUID()}`, role: 'user', content: turn.text })
    return base
  }
  const waiting = agent.pendingInterrupts
  const responses = Object.fromEntries(waiting.map((i) => [i.id, turn.answers[kindOf(i)]]))
  return { ...base, resume: buildResumeArray(waiting, responses) }
}

async function main() {
  const job = await read(process.stdin)
  const agent = new HttpAgent({ url: job.url, threadId: job.threadId })
  const turns = []
  let forgotten = []
  for (const turn of job.turns) {
    if (turn.forget) {
      forgotten = agent.pendingInterrupts
      agent.pendingInterrupts = []
    }
    if (turn.recall) agent.pendingInterrupts = forgotten
    const seen = { events: [], error: null, outcome: null, runId: null, interrupts: [], custom: [] }
    try {
      await agent.runAgent(parameters(agent, turn, job.tools), {
        onEvent: ({ event, input }) => {
          seen.runId = input.runId
          seen.events.push(event.type)
          if (event.type === 'CUSTOM') seen.custom.push(event.name)
          if (seen.events.length === turn.abortAfter) agent.abortRun()
        },
        onRunErrorEvent: ({ event }) => {
          seen.outcome = `error: ${event.message}`
          seen.code = event.code
        },
        onRunFinishedEvent: ({ outcome }) => { seen.outcome = outcome },
        onRunFailed: ({ error }) => { seen.error = String(error) },
      })
    } catch (error) {
      seen.error = String(error)
    }
    seen.interrupts = copy(agent.pendingInterrupts)
    seen.messages = copy(agent.messages)
    const query = `?threadId=${encodeURIComponent(job.threadId)}`
    seen.hydrated = await (await fetch(job.url + query)).json()
    turns.push(seen)
  }
  process.stdout.write(JSON.stringify({ messages: agent.messages, turns, warnings }))
}

main()
