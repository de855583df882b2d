-- The first items of GONE have been dealt with.
local count = number()
call('LTRIM', GONE, text(count), -1)
return {'ok'}
